import json
import re
import shutil
import subprocess

import pytest

from lightning_feddua.cli import main
from lightning_feddua.experiments.plots import STYLES
from tests.experiments.run_folders import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<img src=x onerror=alert(1)>{{data}}</script>&"


@pytest.fixture
def page(tmp_path):
    for seed in range(2):
        rows = [{"val_loss": 10.0**-i * (1 + seed), "eta_g": 1.0} for i in range(4)]
        write_run(tmp_path / f"runs/a{seed}", rows, server="FedExP", seed=seed)
    rows = [{"val_loss": 2.0}, {"val_loss": "nan"}, {"val_loss": "inf"}, {"val_loss": 0.5}]
    write_run(tmp_path / "runs/b", rows, server="FedDuAdam", note=EVIL)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())[1])


def test_charts_have_the_numbers_of_the_logs(page):
    data = embedded(page)
    methods = {method["name"]: method["color"] for method in data["methods"]}
    assert methods == {name: STYLES[name].color for name in ("FedExP", "FedDuAdam")}
    charts = {chart["metric"]: chart for chart in data["charts"]}
    assert charts.keys() == {"val_loss", "eta_g"}
    exp, adam = charts["val_loss"]["series"]
    assert charts["val_loss"]["log"]
    assert exp["mean"] == pytest.approx([2**0.5 * 10.0**-i for i in range(4)], rel=1e-5)
    assert exp["low"][0] < exp["mean"][0] < exp["high"][0]
    assert adam["mean"] == [2.0, None, None, 0.5]
    assert adam["low"] is None


def test_what_runs_say_is_escaped_and_nothing_is_loaded(page):
    text = page.read_text()
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;{{data}}&lt;/script&gt;&amp;" in text
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=[\"']", text)
    assert text.count("</script>") == 2


def test_names_of_methods_are_escaped(tmp_path):
    folder = tmp_path / "<b>&<script>/seed_0"
    write_run(folder / "version_0", [{"loss": 1.0}])
    (folder / "job.yaml").write_text("{}")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<b>" not in text
    assert "<th>&lt;b&gt;&amp;&lt;script&gt;</th>" in text
    assert embedded(tmp_path / "report.html")["methods"][0]["name"] == "<b>&<script>"


def test_it_shows_recipe_header_environment_and_table(page):
    text = page.read_text()
    for part in ("FedExP on Net", "class_path: lightning_feddua.FedExP", "<td>2.13</td>", "mean ± standard deviation"):
        assert part in text


def test_long_runs_are_thinned_out(tmp_path):
    write_run(tmp_path / "runs", [{"loss": float(i)} for i in range(5000)])
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")]) == 0
    rounds = embedded(tmp_path / "report.html")["charts"][0]["series"][0]["rounds"]
    assert (rounds[0], rounds[-1], len(rounds)) == (0, 4999, 1000)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_charts_draw_answer_to_the_pointer_and_hide_methods(page, tmp_path):
    script = """
      const figure = document.querySelector('figure[data-metric=val_loss]'), svg = figure.querySelector('svg');
      const curves = () => [...svg.querySelectorAll('.curve')].map(path => path.dataset.method).join();
      const say = text => document.body.append(Object.assign(document.createElement('output'), {textContent: text}));
      const box = svg.getBoundingClientRect();
      say('curves ' + curves());
      say('gaps ' + svg.querySelectorAll('.curve')[1].getAttribute('d').split('M').length);
      svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 1, clientY: box.top + 50}));
      say('tooltip ' + [...document.querySelectorAll('#tooltip strong, #tooltip td')].map(e => e.textContent).join());
      const button = document.querySelector('#legend button');
      button.click();
      say('hidden ' + curves() + ' ' + button.getAttribute('aria-pressed'));
      button.click();
      figure.querySelector('figcaption button').click();
      say('linear ' + svg.textContent.includes('10⁻') + ' ' + curves());
    """
    opened = tmp_path / "opened.html"
    opened.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    finished = subprocess.run([CHROMIUM, *arguments, opened.as_uri()], capture_output=True, text=True, timeout=120)
    factor = 2 ** (1 / 2**0.5)  # the standard deviation of log 1 and log 2, out of the logarithm
    low, high = 2**0.5 / factor, 2**0.5 * factor
    said = re.findall(r"<output>(.*?)</output>", finished.stdout)
    assert said == [
        "curves FedExP,FedDuAdam",
        # The pen is lifted where a value is not finite.
        "gaps 3",
        f"tooltip round 0,FedDuAdam,2,FedExP,1.4142  [{low:.5g}, {high:.5g}]",
        "hidden FedDuAdam false",
        "linear false FedExP,FedDuAdam",
    ]
    assert "<img" not in finished.stdout
