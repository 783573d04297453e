"""The page in a real Chromium against a live server: a batch from upload to download, a chat beside it, names
and answers that look like markup, and a page that does not grow. Slow; needs Debian's chromium and chromium-driver."""

import csv
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_tools import keys_of
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from test_grafana_live import SERVE, free_port, running

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1300,1000",
)
pytestmark = [
    pytest.mark.manual,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # selenium's own pipes
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    names = ["--served-model-name", "tidemill-demo", "--served-model-name", "second"]
    serve = [*SERVE, *names, "--port", str(port), "--state-dir", str(folder / "state")]
    with running(serve, f"{url}/ready", folder):
        yield url


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Chromium for all tests: its start is what costs."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Any, server: str, tmp_path: Path) -> Iterator[Any]:
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.get_log("browser")  # of a server of the test before, which has ended
    browser.get(server)
    resize(browser, 1300)
    until(lambda: text(browser, "status") == "ready")
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def resize(page: Any, width: int, height: int = 900) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def until(true: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)
    return value


def text(driver: Any, element: str) -> str:
    return str(driver.find_element(By.ID, element).text)


def rows(count: int) -> str:
    body = {"model": "tidemill-demo", "messages": [{"role": "user", "content": "What is a batch?"}], "max_tokens": 16}
    return "\n".join(
        json.dumps({"custom_id": f"row-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i in range(count)
    )


def press(page: Any, words: str) -> None:
    """Press the first button with these words, wherever the page is scrolled to.

    One script finds and presses it, as the page may draw its table anew at any time.
    """
    script = """
        const found = document.evaluate(arguments[0], document, null, XPathResult.FIRST_ORDERED_NODE_TYPE);
        found.singleNodeValue?.scrollIntoView({block: "center"});
        found.singleNodeValue?.click();
        return found.singleNodeValue !== null;
    """
    until(lambda: page.execute_script(script, f"//button[text()='{words}']"))


def show(page: Any, view: str) -> None:
    page.find_element(By.LINK_TEXT, view).click()


def press_summary(page: Any, name: str) -> None:
    """Open the fold of this class."""
    page.execute_script(f"document.querySelector('details.{name}').open = true")


def upload(page: Any, path: Path) -> None:
    page.find_element(By.ID, "file").send_keys(str(path))


def test_a_batch_from_upload_to_download(page: Any, tmp_path: Path) -> None:
    source = tmp_path / "fifty.jsonl"
    source.write_text(rows(50))
    page.execute_script(
        "const e = document.getElementById('price-out'); e.value = 5; e.dispatchEvent(new Event('input'))"
    )
    upload(page, source)
    until(lambda: "50 of 50" in text(page, "batch-rows") and "completed" in text(page, "batch-rows"))
    assert "fifty.jsonl" in text(page, "batch-rows") and "ended" in text(page, "batch-rows")
    bill = r"[\d,]+ \+ [\d,]+ tokens, [\d.]+ m?s of the engine, worth 0\.\d+"
    assert re.search(bill, text(page, "batch-rows"))
    assert re.search(
        r"50 answers: [\d,]+ output, [\d,]+ prompt tokens",
        until(lambda: "50 answers" in text(page, "batch-done") and text(page, "batch-done")),
    )
    press(page, "Results")
    results = until(lambda: list(tmp_path.glob("batch_*.jsonl")))[0]
    until(lambda: len(results.read_text().splitlines()) == 50)
    assert {json.loads(line)["custom_id"] for line in results.read_text().splitlines()} == {
        f"row-{i}" for i in range(50)
    }


def test_a_file_that_is_no_batch_says_where(page: Any, tmp_path: Path) -> None:
    source = tmp_path / "bad.jsonl"
    source.write_text(rows(2) + "\nnot json\n")
    upload(page, source)
    until(lambda: "line 3" in text(page, "batch-rows") and "failed" in text(page, "batch-rows"))


def test_a_chat_is_answered_beside_a_batch(page: Any, tmp_path: Path) -> None:
    source = tmp_path / "many.jsonl"
    source.write_text(rows(300))
    upload(page, source)
    show(page, "Chat")
    press_summary(page, "settings")
    page.find_element(By.ID, "temperature").send_keys("0")
    page.find_element(By.ID, "prompt").send_keys("What is the capital of France?\n")
    until(lambda: "Paris" in text(page, "turns"))
    until(lambda: "first token after" in text(page, "turns"))
    page.refresh()
    until(lambda: "Paris" in text(page, "turns"))  # a reload loses nothing
    press(page, "New chat")
    show(page, "Live")
    press(page, "Cancel")
    press(page, until(lambda: re.search(r"Cancel [\d,]+ lines\?", text(page, "batch-rows")))[0])
    until(lambda: "cancelled" in text(page, "batch-rows"))


def test_an_answer_that_was_cut_off_says_so_and_goes_on(page: Any) -> None:
    show(page, "Chat")
    press_summary(page, "settings")
    for field, value in (("temperature", "0"), ("max-tokens", "6")):
        page.find_element(By.ID, field).send_keys(value)
    page.find_element(By.ID, "prompt").send_keys("What is tidemill?\n")
    until(lambda: "cut off" in text(page, "turns"))
    shown = page.find_element(By.CSS_SELECTOR, ".turn.assistant .text").text
    page.find_element(By.ID, "max-tokens").clear()
    press(page, "Continue")
    until(lambda: len(page.find_element(By.CSS_SELECTOR, ".turn.assistant .text").text) > len(shown) + 20)
    assert page.find_element(By.CSS_SELECTOR, ".turn.assistant .text").text.startswith(shown)


def test_tokens_are_shaded_by_probability_and_name_their_alternatives(page: Any) -> None:
    show(page, "Chat")
    press(page, "New chat")
    press_summary(page, "settings")
    page.find_element(By.ID, "logprobs").click()
    for field, value in (("temperature", "1.5"), ("seed", "1"), ("max-tokens", "6")):
        page.find_element(By.ID, field).send_keys(value)
    page.find_element(By.ID, "prompt").send_keys("What is tidemill?\n")
    until(lambda: "first token after" in text(page, "turns") and not page.execute_script(RUNNING))
    tokens = page.find_elements(By.CSS_SELECTOR, ".turn.assistant .tokens > span")
    assert len(tokens) == 6
    doubts = [page.execute_script("return arguments[0].style.getPropertyValue('--doubt')", each) for each in tokens]
    assert len(set(doubts)) > 1 and all(0 <= int(doubt.removesuffix("%")) <= 85 for doubt in doubts)
    note = page.find_element(By.CSS_SELECTOR, ".turn.assistant .note")
    ActionChains(page).move_to_element(tokens[1]).perform()
    assert re.match(r'".*" [\d.]+ %, else (".*" [\d.]+ %(, )?){4,5}$', until(lambda: "else" in note.text and note.text))
    page.execute_script("arguments[0].focus()", tokens[0])
    first = note.text
    ActionChains(page).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert page.switch_to.active_element == tokens[2] and note.text != first
    shown = page.find_element(By.CSS_SELECTOR, ".tokens").text
    press(page, "Continue")
    until(lambda: not page.execute_script(RUNNING))
    assert page.find_element(By.CSS_SELECTOR, ".tokens").text.startswith(shown)
    assert len(page.find_elements(By.CSS_SELECTOR, ".turn.assistant .tokens > span")) > 6
    page.refresh()
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".turn.assistant .text"))
    assert not page.find_elements(By.CSS_SELECTOR, ".tokens"), "a reload keeps the text, not the alternatives"


RUNNING = "return document.getElementById('send').textContent == 'Stop'"


def test_two_columns_answer_side_by_side_and_stop_together(page: Any) -> None:
    show(page, "Chat")
    press(page, "New chat")
    page.find_element(By.ID, "prompt").send_keys("What is the capital of France?\n")
    until(lambda: "first token after" in text(page, "turns") and not page.execute_script(RUNNING))
    page.find_element(By.ID, "beside").click()
    assert "capital of France" in text(page, "turns-2"), "the second column goes on from the same messages"
    assert page.find_element(By.ID, "models").get_property("value") == "tidemill-demo"
    assert page.find_element(By.ID, "models-2").get_property("value") == "second"
    page.execute_script("document.querySelector('#column-2 .settings').open = true")
    page.find_element(By.ID, "max-tokens-2").send_keys("2")
    page.find_element(By.ID, "prompt").send_keys("And of Spain?\n")
    until(lambda: text(page, "turns-2").count("first token after") == 1 and not page.execute_script(RUNNING))
    assert text(page, "turns").count("first token after") == 2
    assert "2 tokens" in text(page, "turns-2") and "cut off" in text(page, "turns-2")
    page.find_element(By.ID, "prompt").send_keys("And of Italy?")
    page.execute_script("const f = document.getElementById('ask'); f.requestSubmit(); f.requestSubmit()")
    until(lambda: not page.execute_script(RUNNING))
    assert "stopped" in text(page, "turns") and "stopped" in text(page, "turns-2")
    press(page, "New chat")
    assert not text(page, "turns") and not text(page, "turns-2")
    page.find_element(By.ID, "beside").click()
    assert not page.find_element(By.ID, "column-2").is_displayed()


OUTSIDE = """
return [...document.querySelectorAll(".card")].flatMap((card) => {
  const edge = card.getBoundingClientRect();
  return [...card.querySelectorAll(":not(.hidden, .skip)")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width && each.checkVisibility() && (box.right > edge.right + 1 || box.left < edge.left - 1);
  }).map((each) => `${each.outerHTML.slice(0, 120)} in ${card.id}`);
});
"""


def test_teams_and_two_answers_stand_within_their_cards(page: Any, tmp_path: Path) -> None:
    """An operator sees all teams, a team itself. SCREENSHOTS=FOLDER keeps each width and theme."""
    port, long_name = free_port(), "w" * 64
    url = f"http://127.0.0.1:{port}"
    keys = keys_of(tmp_path, "boss ops operator", "shop shop requests=1", f"long {long_name}")
    flags = ["--port", str(port), "--state-dir", str(tmp_path / "state"), "--api-key-file", keys]
    with running([*SERVE, *flags], f"{url}/ready", tmp_path):
        body = json.loads(rows(1))["body"]
        for key in ("shop", "long"):
            head = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=head).status_code == 200
        sent = {"file": (f"{long_name}.jsonl", rows(1))}
        stored = httpx.post(f"{url}/v1/files", files=sent, data={"purpose": "batch"}, headers=head).json()
        made = {"input_file_id": stored["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        assert httpx.post(f"{url}/v1/batches", json=made, headers=head).status_code == 200
        page.get(url)
        enter_key(page, "shop")
        until(lambda: "shop" in text(page, "team-rows"))
        assert "shop" in text(page, "team-rows") and long_name not in text(page, "team-rows") + text(page, "batch-rows")
        page.execute_script("sessionStorage.setItem('tidemill-key', 'boss')")
        page.refresh()
        until(lambda: text(page, "status") == "ready")
        (tmp_path / "wrong.jsonl").write_text(rows(2).replace("tidemill-demo", "no-such-model-of-a-rather-long-name"))
        upload(page, tmp_path / "wrong.jsonl")
        until(lambda: long_name in text(page, "team-rows") and "failed" in text(page, "batch-rows"))
        assert f"{long_name}.jsonl" in text(page, "batch-rows"), "an operator sees the batches of all teams"
        assert re.search(r"^shop [1-9]\d* \+ [1-9]\d* 0 \+ 0 ", text(page, "team-rows"), re.MULTILINE)
        show(page, "Chat")
        press_summary(page, "settings")
        for tick in ("beside", "logprobs"):
            page.find_element(By.ID, tick).click()
        for field, value in (("temperature", "1.5"), ("seed", "1"), ("max-tokens", "80")):
            page.find_element(By.ID, field).send_keys(value)
        page.execute_script("document.getElementById('max-tokens-2').value = 40")
        page.find_element(By.ID, "prompt").send_keys(f"What is tidemill? {long_name}\n")
        until(lambda: not page.execute_script(RUNNING) and "first token after" in text(page, "turns-2"))
        page.execute_script("document.querySelector('.tokens > :nth-child(3)').focus()")
        for width in (1440, 1024, 400):
            for theme in ("light", "dark"):
                media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
                page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
                for view in ("Live", "Chat"):
                    resize(page, width)
                    show(page, view)
                    time.sleep(1.5)  # a drawing
                    keep_picture(page, f"teams-{view}-{width}-{theme}.png")
                    assert page.execute_script(OUTSIDE) == [], (width, theme, view)
    page.get_log("browser")  # of a key that may not see all figures


def enter_key(page: Any, key: str) -> None:
    until(lambda: page.find_element(By.ID, "key-dialog").is_displayed())
    page.find_element(By.ID, "key").send_keys(key + "\n")


def keep_picture(page: Any, name: str) -> None:
    """With SCREENSHOTS=FOLDER keep the whole page as it looks."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.execute_script("document.activeElement.blur()")
        width = page.execute_script("return innerWidth")
        resize(page, width, max(900, page.execute_script("return document.documentElement.scrollHeight")))
        until(lambda: page.get_screenshot_as_file(str(Path(folder) / name)))


def test_a_table_from_drop_to_download(page: Any, tmp_path: Path) -> None:
    """SCREENSHOTS=FOLDER keeps the form with its previews in each width and theme."""
    long_name = "a column with a rather long name, " * 4
    source = tmp_path / f"{'long' * 30}.csv"
    with source.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["country", long_name.strip(), *(f"column{i}" for i in range(40))])
        writer.writerows([country, "w" * 300, *range(40)] for country in ("France", "Italy", "<b>Spain</b>", "Japan"))
    upload(page, source)
    form = page.find_element(By.ID, "table")
    until(lambda: "4 rows" in form.text)
    prompt = form.find_element(By.NAME, "prompt")
    assert all(0 < chip.size["height"] < 100 for chip in form.find_elements(By.CLASS_NAME, "chip"))
    prompt.send_keys("What is the capital of ")
    press(page, "{country}")
    prompt.send_keys("?")
    form.find_element(By.NAME, "prefix").send_keys("llm_")
    form.find_element(By.NAME, "max_tokens").send_keys("30")
    press(page, "Preview three answers")
    until(
        lambda: (
            "output tokens" in form.text
            and "…" not in form.text
            and not form.find_elements(By.CSS_SELECTOR, ":disabled")
        )
    )
    shown = [each.text for each in form.find_elements(By.CSS_SELECTOR, ".first li")]
    assert len(shown) == 3 and "What is the capital of France?" in shown[0] and "Paris" in shown[0]
    assert "<b>Spain</b>" in shown[2]
    for width in (1440, 1024, 400):
        for theme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            resize(page, width)
            time.sleep(1.5)  # a drawing
            keep_picture(page, f"table-{width}-{theme}.png")
            assert page.execute_script(OUTSIDE) == [], (width, theme)
    press(page, "Start")
    until(lambda: "4 of 4" in text(page, "batch-rows") and not form.is_displayed())
    for width in (400, 1024, 1300):
        resize(page, width)
        assert page.execute_script(OUTSIDE) == [], width
    press(page, "Table")
    written = until(lambda: list(tmp_path.glob("answers-*.csv")))[0]
    rows_written = until(lambda: list(csv.DictReader(written.read_text().splitlines())))
    assert [row["country"] for row in rows_written] == ["France", "Italy", "<b>Spain</b>", "Japan"]
    assert rows_written[0]["llm_status"] == "ok" and "Paris" in rows_written[0]["llm_answer"]
    second = tmp_path / "second.csv"
    second.write_text("town\nRome\n")
    upload(page, second)
    until(lambda: "the prompt names the column 'country'" in form.text)
    assert [chip.text for chip in form.find_elements(By.CLASS_NAME, "chip")] == ["{town}"] and "1 rows" in form.text
    assert page.get_log("browser"), "the refusal"


def test_markup_in_messages_and_names_stays_text(page: Any, tmp_path: Path) -> None:
    trap = "<img src=x onerror=window.caught=1><script>window.caught=1</script>"
    source = tmp_path / "<b onmouseover=alert(1)>.jsonl"
    source.write_text("not json " + trap)
    upload(page, source)
    until(lambda: "line 1" in text(page, "batch-rows"))
    assert source.name in text(page, "batch-rows")
    show(page, "Chat")
    page.find_element(By.ID, "prompt").send_keys(trap + "\n")
    until(lambda: trap in text(page, "turns"))
    until(lambda: "first token after" in text(page, "turns"))  # the answer may repeat it
    assert page.execute_script("return window.caught === undefined && !document.querySelector('#turns img')")


def test_a_key_is_asked_for_where_keys_are_configured(page: Any, tmp_path: Path) -> None:
    """A second server on the way: the first one of this module has no keys."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--port", str(port), "--state-dir", str(tmp_path / "state"), "--api-key", "sk-right"]
    with running([*SERVE, *flags], f"{url}/ready", tmp_path):
        assert httpx.get(f"{url}/dashboard/history").status_code == 401
        page.get(url)
        for key in ("sk-wrong", "sk-right"):
            enter_key(page, key)
            if key == "sk-wrong":
                until(lambda: text(page, "key-note") == "That key was not accepted.")
        until(lambda: text(page, "status") == "ready")
    page.get_log("browser")  # the 401s are in there


@contextmanager
def talking(page: Any, people: int) -> Iterator[None]:
    """Let this number of clients send a chat every two seconds, for the length of the block."""
    address, ended = f"{page.current_url}v1/chat/completions", threading.Event()

    def ask(number: int) -> None:
        draw = random.Random(number)
        while not ended.wait(2 * draw.expovariate(1.0)):
            body = json.loads(rows(1))["body"] | {"stream": True, "max_tokens": draw.choice((8, 24, 60))}
            assert httpx.post(address, json=body, timeout=60).status_code == 200

    with ThreadPoolExecutor(people) as talkers:
        asked = [talkers.submit(ask, number) for number in range(people)]
        try:
            yield
        finally:
            ended.set()
        assert [future.result() for future in asked] == [None] * people


PAGE_MINUTES = float(os.environ.get("PAGE_MINUTES", "2"))


@pytest.mark.timeout(900 + 60 * PAGE_MINUTES)
def test_an_open_page_does_not_grow(page: Any) -> None:
    """PAGE_MINUTES (2) with new figures and two chats every second: neither nodes nor memory grow. The history that a
    page keeps is full after a quarter of an hour: with more minutes than 16 it is measured from there."""

    def size() -> tuple[int, float]:
        page.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        metrics = {m["name"]: m["value"] for m in page.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]}
        return int(metrics["Nodes"]), metrics["JSHeapUsedSize"]

    before = 16.0 if PAGE_MINUTES > 16 else PAGE_MINUTES / 2
    page.execute_cdp_cmd("Performance.enable", {})
    with talking(page, 4):
        time.sleep(60 * before)
        nodes, heap = size()
        time.sleep(60 * (PAGE_MINUTES - before))
        later_nodes, later_heap = size()
    print(f"after {before:g} and {PAGE_MINUTES:g} min: {nodes}, {later_nodes} nodes; {heap:.0f}, {later_heap:.0f} B")
    assert later_nodes < nodes + 300 and later_heap < heap + 1_000_000, (nodes, later_nodes, heap, later_heap)


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        ("Live", {"Skip to content", "Live", "Chat", "file", "window", "only-running", "span"}),
        ("Chat", {"Skip to content", "Live", "Chat", "clear", "copy", "beside", "models", "prompt", "send"}),
    ],
)
def test_all_of_it_is_reached_by_keyboard_and_seen(page: Any, view: str, wanted: set[str]) -> None:
    show(page, view)
    found = {}
    for _ in range(30):
        ActionChains(page).send_keys(Keys.TAB).perform()
        element = page.switch_to.active_element
        if element.tag_name == "body":
            continue  # round the end
        name = element.get_attribute("id") or element.text
        outlined = (
            "return [arguments[0], arguments[0].previousElementSibling]"
            ".some(e => e && getComputedStyle(e).outlineStyle != 'none')"
        )
        found[name] = page.execute_script(outlined, element)
    assert wanted <= set(found)
    assert [name for name, seen in found.items() if name and not seen] == []


@contextmanager
def busy(page: Any, tmp_path: Path) -> Iterator[None]:
    """Run a batch of 20,000 rows beside five chatting clients, for a minute and the length of the block."""
    source = tmp_path / "many.jsonl"
    source.write_text(rows(20_000))
    upload(page, source)
    with talking(page, 5):
        time.sleep(60)
        yield


@pytest.mark.parametrize(("width", "theme"), [(400, "dark"), (1300, "light"), (1300, "dark")])
def test_nothing_is_wider_than_the_window_in_light_and_dark(page: Any, tmp_path: Path, width: int, theme: str) -> None:
    """With SCREENSHOTS=FOLDER each is kept as it looks beside chats and a batch: the README's is page-1300-dark.png."""
    resize(page, width)
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})
    until(lambda: page.execute_script("return document.documentElement.scrollWidth") <= width)
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 382) == (theme == "dark"), ground
    if folder := os.environ.get("SCREENSHOTS"):
        with busy(page, tmp_path):
            resize(page, width, page.execute_script("return document.documentElement.scrollHeight"))
            until(lambda: page.get_screenshot_as_file(str(Path(folder) / f"page-{width}-{theme}.png")))
        press(page, "Cancel")
        press(page, until(lambda: re.search(r"Cancel [\d,]+ lines\?", text(page, "batch-rows")))[0])
