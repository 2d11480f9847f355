"""Every kind of page in a real browser, from a file, without a network, on a desktop and a phone.

MESHWISE_SCREENSHOTS=DIR keeps a picture of each.
"""

import functools
import os
import runpy
from pathlib import Path

import msgspec
import pytest

from meshwise.pages import html
from meshwise.pages.steps import result
from meshwise.pages.verdict import Contents
from meshwise.spec import Case, Collective, Sample
from tests import sample_records as known
from tests.pages import browser
from tests.pages.browser import DESKTOP, PHONE

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
NASTY = "<img src=x onerror=alert(1)><script>alert('$x$')</script>&amp;"
SIZES = {"desktop": DESKTOP, "phone": PHONE}


def steps(plan, run_id: str, step_s: float):
    times = [step_s * (1 + 0.002 * (i % 7)) for i in range(20)]
    sample = known.step_sample(plan, times, peak_bytes=float(4.1 * 2**30))
    return known.info("run", plan, run_id), (sample,)


def report(name: str = "") -> str:
    """A page with all parts; ``name``: of the model, the cluster and the links."""
    plan, costs, measured = known.answered(), known.COSTS, known.info()
    rival = known.plan(known.RIVAL, 0.012)
    if name:
        tier = msgspec.structs.replace(known.CLUSTER.tiers[0], name=name)
        cluster = msgspec.structs.replace(known.CLUSTER, name=name, tiers=(tier,))
        model = msgspec.structs.replace(plan.model, name=name)
        plan, rival = (
            msgspec.structs.replace(each, model=model, cluster=cluster) for each in (plan, rival)
        )
        costs = msgspec.structs.replace(costs, cluster=cluster)
        measured = msgspec.structs.replace(measured, cluster=cluster, reason=name)
    runs = [steps(plan, "run-1", 0.0104), steps(rival, "run-2", 0.0125)]
    done = tuple(result(info, list(samples)) for info, samples in runs)
    return html.page(Contents(plan, costs, done, (*runs, (measured, known.SAMPLES), pairs())))


def pairs():
    """Collectives over sizes, in place and not, and sends between all pairs, one of them slow."""
    ops = [
        Collective(kind="all_reduce", size_bytes=2**power, group_size=4, in_place=place)
        for power in range(12, 31, 3)
        for place in (False, True)
    ]
    ops += [
        Collective(kind="send", size_bytes=2**26, group_size=2, ranks=(a, b))
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    samples = []
    for op in ops:
        case = Case(op=op, world_size=4)
        time_s = (2e-5 + op.bytes / 3e11) * (2 if op.ranks == (2, 1) else 1)
        times = tuple(time_s * (1 + 0.01 * (i % 3)) for i in range(10))
        samples.append(Sample(case_id=case.id, case=case, status="ok", times_s=times))
    return known.info(run_id="20260102T000000-measure-collectives-four"), tuple(samples)


def many() -> str:
    """10,000 samples."""
    made = runpy.run_path(str(Path(__file__).parents[2] / "tools/page_of_many.py"))
    return html.page(made["contents"](10_000))


PAGES = {
    "report": report,
    "hostile": functools.partial(report, NASTY),
    "plan": lambda: html.page(Contents(known.plan(), None, (), ())),
    "many": many,
    "measured": lambda: html.page(Contents(None, None, (), (pairs(),))),
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    running = browser.Chromium(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pages")


def written(folder: Path, name: str) -> Path:
    path = folder / f"{name}.html"
    if not path.exists():
        path.write_text(PAGES[name]())
    return path


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_quietly_and_is_no_wider_than_the_window(chromium, folder, name, size):
    path = written(folder, name)
    with chromium.page(path, SIZES[size]) as page:
        assert page.errors == []
        assert page.requests == [path.as_uri()]
        assert path.stat().st_size <= 1_500_000
        width = page.ask("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= SIZES[size][0] == width[1]
        if kept := os.environ.get("MESHWISE_SCREENSHOTS"):
            page.screenshot(Path(kept) / f"{name}-{size}.png")
            page.click("#theme")
            page.screenshot(Path(kept) / f"{name}-{size}-dark.png")


@pytest.mark.parametrize("size", SIZES)
def test_the_first_screen_holds_verdict_facts_and_contents(chromium, folder, size):
    """On a phone the verdict; the rest is below it."""
    with chromium.page(written(folder, "report"), SIZES[size]) as page:
        ends = "(q) => document.querySelector(q).getBoundingClientRect().bottom"
        for query in {"desktop": (".answers", ".facts", "nav"), "phone": (".cards",)}[size]:
            assert page.ask(f"({ends})('{query}')") <= SIZES[size][1], query


def test_names_with_markup_stay_text(chromium, folder):
    with chromium.page(written(folder, "hostile"), DESKTOP) as page:
        assert page.errors == [] and len(page.requests) == 1
        assert page.ask("document.querySelectorAll('img, script').length") == 1  # our script
        assert NASTY in page.ask("document.querySelector('h1').textContent")


def column(page, head: str) -> list[str]:
    """The cells of the first table's column with that head."""
    return page.ask(
        "(() => { const table = document.querySelector('table');"
        f"const at = [...table.querySelectorAll('th')].findIndex(h => h.textContent === '{head}');"
        "return [...table.tBodies[0].rows].map(r => r.cells[at].textContent); })()"
    )


def test_a_click_on_a_head_sorts_the_table_and_another_turns_it(chromium, folder):
    with chromium.page(written(folder, "report"), DESKTOP) as page:
        before = column(page, "measured")
        assert len(before) == 2
        head = "table thead th:nth-child(4)"
        assert page.ask(f"document.querySelector('{head}').textContent") == "measured"
        page.click(head)
        assert column(page, "measured") == sorted(before)
        assert page.ask(f"document.querySelector('{head}').ariaSort") == "ascending"
        page.click(head)
        assert column(page, "measured") == sorted(before, reverse=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.2 ms", 1.2e-3), ("244 – 308 ms", 0.244), ("868 ms – 2.69 s", 0.868), ("1,894", 1894),
        ("-7.5 %", -7.5), ("277 ms *", 0.277), ("501 TFLOP/s", 501e12), ("9.00 us", 9e-6),
        ("760 M", 760e6), ("118 k", 118e3), ("35.5 GiB", 35.5e9), ("2 min", 120), ("1.04 x", 1.04),
        ("dp4 zero2", None), ("–", None),
    ],
)  # fmt: skip
def test_cells_are_sorted_by_what_they_say(chromium, folder, text, value):
    with chromium.page(written(folder, "plan"), DESKTOP) as page:
        found = page.ask(f"((x) => isNaN(x) ? null : x)(value({text!r}))")
        assert found == (value if value is None else pytest.approx(value))


def test_the_theme_switches_by_a_click_and_stays_readable(chromium, folder):
    with chromium.page(written(folder, "report"), DESKTOP) as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        assert page.ask(ground) == "rgb(255, 255, 255)"
        page.click("#theme")
        assert page.ask(ground) == "rgb(20, 23, 27)"
        page.click("#theme")
        assert page.ask(ground) == "rgb(255, 255, 255)"


def test_every_table_is_saved_as_csv_with_its_heads(chromium, folder, tmp_path):
    with chromium.page(written(folder, "hostile"), DESKTOP) as page:
        page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        buttons = "document.querySelectorAll('figcaption button').length"
        assert page.ask(buttons) == page.ask("document.querySelectorAll('.table table').length")
        page.click("figcaption button")
        saved = wait_for(tmp_path)
    lines = saved.read_text().splitlines()
    assert lines[0].startswith('"layout","predicted","interval","measured"')
    assert len(lines) == 3 and lines[1].startswith(f'"{known.LAYOUT.name}"')


def wait_for(folder: Path) -> Path:
    import time

    for _ in range(200):
        if found := [path for path in folder.iterdir() if path.suffix == ".csv"]:
            return found[0]
        time.sleep(0.05)
    raise AssertionError("nothing was saved")


def test_a_spreadsheet_runs_no_cell(chromium, folder):
    with chromium.page(written(folder, "plan"), DESKTOP) as page:
        texts = ["=1+1", "@x", "+a", "-7.5 %", 'a "b"']
        cells = page.ask(f"{texts!r}.map(textContent => cell({{textContent}}))")
    assert cells == ['"\'=1+1"', '"\'@x"', '"\'+a"', '"-7.5 %"', '"a ""b"""']


def test_without_scripts_all_is_there(chromium, folder):
    with chromium.page(written(folder, "report"), DESKTOP, scripts=False) as page:
        page.call("Emulation.setScriptExecutionDisabled", value=False)
        assert page.ask("document.querySelectorAll('button').length") == 0
        assert page.ask("document.querySelectorAll('table, svg').length") > 20
        assert "cannot be told apart from 1" in page.ask("document.body.innerText")


def test_wide_tables_scroll_in_themselves_and_say_so(chromium, folder):
    with chromium.page(written(folder, "report"), PHONE) as page:
        wide, marked = page.ask(
            "(() => { const all = [...document.querySelectorAll('.scroll')];"
            "const of = all.filter(e => e.offsetParent);"
            "return [of.filter(e => e.scrollWidth > e.clientWidth).length,"
            "of.filter(e => e.classList.contains('more')).length]; })()"
        )
    assert wide == marked > 0
