"""Whatever is changed in a checkpoint: it is refused in a sentence that names the file, or the result is the same."""

import math
import os
import random
import struct
import zipfile

import pytest
import torch

from lightning_feddua import ConfigurationError, FedDuAdam, Scaffold
from lightning_feddua.callbacks import Checkpoint, EarlyStopping
from lightning_feddua.checkpoints.files import DamagedError, read
from tests.checkpoints.checkpointed_runs import assert_same, clients, make, rewrite
from tests.modules import Classifier

TRIES = int(os.environ.get("FEDDUA_TEST_TAMPERING", "25"))
STRANGE = [None, True, 7, -1, 1.5, math.nan, "x", "../../x.ckpt", b"x", [], (), {}, {"x": 1}, [None], torch.ones(())]
STRANGE += [torch.ones(1), torch.zeros(3, dtype=torch.int64), torch.empty(0), 10**30, "engine"]


class Plain(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(loop, ckpt_path=None):
    torch.manual_seed(3)
    model = Plain()
    loop.fit(model, clients(), ckpt_path)
    return model


def make_loop(folder, **arguments):
    callbacks = [Checkpoint(monitor="val_loss", save_top_k=2), EarlyStopping("val_loss", patience=9)]
    return make(
        server=FedDuAdam(), client=Scaffold(), engine="sequential", out_dir=folder, callbacks=callbacks, **arguments
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    loop = make_loop(folder, max_rounds=2)
    fit(loop)
    expected = fit(make_loop(folder))
    return loop.run_dir / "last.ckpt", expected


def places(tree, path=()):
    """Every entry of a tree, as the way to it."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from places(value, (*path, index))


def entry(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def reshaped(tensor, draw):
    """Another tensor that could be taken for this one."""
    others = [tensor.to(torch.float16), tensor.to(torch.float64), tensor.to(torch.int32), tensor.flatten()[:1]]
    others += [tensor.flatten(), tensor.unsqueeze(0), torch.cat([tensor.flatten()] * 2), tensor[None][:0]]
    return draw.choice([other for other in others if (other.shape, other.dtype) != (tensor.shape, tensor.dtype)])


def change(checkpoint, draw):
    """One entry: dropped, doubled under another name, or made something else. Returns what was done, and where."""
    known = [path for path in places(checkpoint) if path]
    while True:
        path = draw.choice(known)
        parent, value = entry(checkpoint, path[:-1]), entry(checkpoint, path)
        what = draw.choice(["dropped", "added", "strange", "reshaped"])
        # A client without vectors is one that has not taken part yet.
        if isinstance(parent, tuple) or (what == "dropped" and "rows" in path):
            continue
        if what == "reshaped":
            if isinstance(value, torch.Tensor):
                parent[path[-1]] = reshaped(value, draw)
                return what, path
        elif what == "dropped":
            del parent[path[-1]]
            return what, path
        elif what == "added":
            if isinstance(parent, dict):
                parent[draw.choice(["x", 3, None])] = value
                return what, path
        else:
            other = draw.choice(STRANGE)
            if type(other) is not type(value) or isinstance(other, torch.Tensor):
                parent[path[-1]] = other
                return f"{other!r}", path


def test_every_change_is_refused_or_harmless(saved, tmp_path):
    """By somebody who makes the digest fit again; names, shapes and types, since other values are another run's."""
    path, expected = saved
    content, refused = path.read_bytes(), 0
    for number in range(TRIES):
        draw = random.Random(number)
        copy = tmp_path / f"{number}.ckpt"
        copy.write_bytes(content)
        done = []
        try:
            rewrite(copy, lambda checkpoint, draw=draw, done=done: done.append(change(checkpoint, draw)))
        except (KeyError, TypeError, AttributeError):
            # What is left has no place for a digest.
            continue
        try:
            model = fit(make_loop(tmp_path / f"runs{number}"), copy)
        except Exception as error:
            if not isinstance(error, ConfigurationError) or str(copy) not in str(error) or "\n" in str(error):
                raise AssertionError(f"{number}: {done}") from error
            refused += 1
            continue
        for (name, a), (_, b) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
            assert torch.equal(a, b), (number, done, name)
    assert refused > TRIES / 4


def test_no_value_changes_unnoticed(saved, tmp_path):
    path, _ = saved
    copy = tmp_path / "x.ckpt"
    for number in range(100):
        draw = random.Random(number)
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint, draw)
        torch.save(checkpoint, copy)
        with pytest.raises(ConfigurationError, match=r"x\.ckpt"):
            read(copy)


def test_one_element_is_not_spread_over_the_weights(saved, tmp_path):
    path, _ = saved
    for names in (("federated", "weights"), ("federated", "average"), ("federated", "buffers"), ("state_dict",)):
        copy = tmp_path / "x.ckpt"
        copy.write_bytes(path.read_bytes())

        def spread(checkpoint, names=names):
            tensors = entry(checkpoint, names)
            name = next(name for name, tensor in tensors.items() if tensor.numel() > 1)
            tensors[name] = torch.ones(1)

        rewrite(copy, spread)
        with pytest.raises(
            ConfigurationError, match=rf"x\.ckpt` does not fit this run: `.*` among its `{names[-1]}` is"
        ):
            fit(make_loop(tmp_path), copy)


def test_a_module_is_not_changed_by_a_checkpoint_that_is_refused(saved, tmp_path):
    path, _ = saved
    copy = tmp_path / "x.ckpt"
    copy.write_bytes(path.read_bytes())
    rewrite(copy, lambda checkpoint: checkpoint["federated"]["parts"]["server"].update(v=torch.ones(1)))
    torch.manual_seed(5)
    model, before = Plain(), Plain()
    before.load_state_dict(model.state_dict())
    with pytest.raises(ConfigurationError, match="a tensor in its state of `server` is"):
        make_loop(tmp_path).fit(model, clients(), copy)
    assert_same(model, before)


def repacked(path, change):
    """The file with another pickle in it, under right checksums."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    entries[name] = change(entries[name])
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def test_sizes_that_are_not_there_are_refused_before_anything_is_allocated(tmp_path):
    path = tmp_path / "x.ckpt"
    number = b"M" + struct.pack("<H", 4321)

    def replaced(times, huge):
        def change(content):
            assert content.count(number) >= times
            return content.replace(number, huge, times)

        return change

    # The declared memory comes before the shape.
    for change in (
        replaced(1, b"J" + struct.pack("<i", 2**31 - 1)),
        replaced(2, b"J" + struct.pack("<i", 2**31 - 1)),
        replaced(1, b"M" + struct.pack("<H", 4322)),
        lambda content: content.replace(b"q\x00", b"r\xff\xff\xff\xff", 1),
    ):
        torch.save({"federated": {"format": 2}, "x": torch.zeros(4321)}, path)
        repacked(path, change)
        with pytest.raises(DamagedError, match=r"x\.ckpt` (declares|is damaged)"):
            read(path)
    torch.save({"federated": {"format": 2}, "x": torch.zeros(1).expand(2**40)}, path)
    with pytest.raises(DamagedError, match=r"x\.ckpt` is not as it was written"):
        read(path)


def test_compressed_entries_are_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data/0", bytes(2**24))
    with pytest.raises(DamagedError, match="damaged in"):
        read(path)


def test_no_file_elsewhere_is_removed(saved, tmp_path):
    path, _ = saved
    victim = tmp_path / "victim.ckpt"
    for name in (str(victim), "../victim.ckpt", "../../victim.ckpt", "metrics.csv"):
        victim.write_text("mine")
        copy = tmp_path / "x.ckpt"
        copy.write_bytes(path.read_bytes())

        def name_it(checkpoint, name=name):
            parts = checkpoint["federated"]["parts"]
            parts["lightning_feddua.callbacks.checkpoint.Checkpoint 0"]["scores"][name] = 1e9

        rewrite(copy, name_it)
        with pytest.raises(ConfigurationError, match="among the files that were kept"):
            fit(make_loop(tmp_path / "runs"), copy)
        assert victim.exists()


def test_what_repeats_itself_without_end_is_refused_at_once(tmp_path):
    """Each list holds the one before it ten times, or itself."""
    path = tmp_path / "x.ckpt"
    bomb, circle = [0], []
    for _ in range(30):
        bomb = [bomb] * 10
    circle.append(circle)
    for content in (bomb, circle, {"a": (bomb, {1: bomb})}):
        torch.save({"federated": {"format": 2, "history": content, "digest": ""}}, path)
        with pytest.raises(DamagedError, match=r"x\.ckpt` is damaged or no checkpoint at all"):
            read(path)
