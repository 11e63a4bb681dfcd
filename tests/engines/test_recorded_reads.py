from dataclasses import dataclass, replace

import pytest

from lightning_feddua.engines.recorded_reads import RecordedReads


@dataclass(frozen=True)
class Work:
    steps: int


class Thing:
    shared = 1.0

    def __init__(self):
        self.read, self.unread, self.written = 1.0, 2.0, 3.0
        self.numbers = [1, {"a": 2}]
        self.work = Work(3)
        self.part = object()

    @property
    def twice(self):
        return 2 * self.read

    def method(self):
        return self.twice


@pytest.fixture
def recorded():
    thing = Thing()
    reads = RecordedReads({"Thing": thing}, opaque={}, leave_out=["part"])
    with reads.recording():
        assert thing.method() == 2.0
        # Not the same name: whoever looks for classes by name must find one.
        assert type(thing).__name__ == "_RecordedThing"
        assert isinstance(thing, Thing)
        thing.written = 5.0
        _ = thing.written, thing.numbers, thing.work, thing.part, thing.shared
    assert type(thing) is Thing
    return thing, reads


def test_nothing_has_changed_at_first(recorded):
    assert recorded[1].changed() is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda thing: setattr(thing, "read", 1.5), "Thing.read"),
        (lambda thing: thing.numbers[1].update(a=3), "Thing.numbers"),
        (lambda thing: setattr(thing, "work", Work(4)), "Thing.work"),
        (lambda thing: delattr(thing, "read"), "Thing.read"),
        (lambda thing: setattr(thing, "numbers", [1, {"a": 2}]), None),
        (lambda thing: setattr(thing, "work", replace(thing.work)), None),
        (lambda thing: setattr(thing, "unread", 0.0), None),
        (lambda thing: setattr(thing, "written", 0.0), None),
        (lambda thing: setattr(thing, "part", None), None),
    ],
)
def test_only_a_change_of_what_was_read_counts(recorded, change, name):
    thing, reads = recorded
    change(thing)
    assert reads.changed() == name


def test_of_an_opaque_object_all_numbers_count_as_read():
    thing = Thing()
    reads = RecordedReads({}, opaque={"Thing": thing})
    assert reads.changed() is None
    thing.unread = 0.0
    assert reads.changed() == "Thing.unread"


def test_an_error_gives_the_classes_back():
    thing = Thing()
    reads = RecordedReads({"Thing": thing}, opaque={})
    with pytest.raises(KeyError), reads.recording():
        raise KeyError
    assert type(thing) is Thing
