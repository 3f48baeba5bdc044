"""The page in a real browser: what a visitor sees, hears and can do. Nothing may be said on the console or asked of any
other machine; `visit` checks both after every test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specdecode_app import recorded

pytestmark = pytest.mark.browser

Visit = Callable[..., Any]

PICTURE = """() => {
  const find = (root) => { for (const e of root.querySelectorAll('*')) { if (e.matches('.board')) return e;
    const inner = e.shadowRoot && find(e.shadowRoot); if (inner) return inner; } return null; };
  const it = find(document);
  const shown = [...it.querySelectorAll('.node, .edge')].filter((e) => e.getAttribute('display') !== 'none');
  return JSON.stringify({ cursor: it.dataset.cursor, caption: it.querySelector('.caption').textContent,
    panel: it.querySelector('.panel').textContent, kv: it.querySelector('.kv').textContent,
    text: [...it.querySelectorAll('.round')].map((e) => e.dataset.when),
    tree: shown.map((e) => ['transform', 'opacity', 'data-status', 'd'].map((name) => e.getAttribute(name))) });
}"""


def cursor(page: Any) -> str:
    found: str = page.locator(".board").get_attribute("data-cursor")
    return found


def press(page: Any, *keys: str) -> None:
    """Press keys and wait until nothing moves."""
    for key in keys:
        page.keyboard.press(key)
    page.locator(".board:not([data-moving])").wait_for()


def upload(page: Any, path: Path, until: str) -> None:
    """Open a trace file through the page's own button, and wait for what must come of it."""
    page.get_by_role("button", name="Trace file").click()
    page.locator('input[type="file"]').set_input_files(str(path))
    page.locator(until).first.wait_for(state="attached")
    page.keyboard.press("Escape")


def test_first_tree_is_soon(visit: Visit) -> None:
    visit()
    page = visit()
    seconds = []
    for _ in range(3):
        page.reload()
        page.locator('[data-testid="stAppViewContainer"]').wait_for()
        ready = page.evaluate("performance.now()")
        page.locator(".board .node").first.wait_for()
        seconds.append((page.evaluate("performance.now()") - ready) / 1000)
    assert min(seconds) < 1.5, seconds


def test_starts_paused_at_a_telling_point(visit: Visit) -> None:
    page = visit()
    assert page.locator(".board").get_attribute("data-kind") == "test"
    assert page.get_by_role("button", name="Play", exact=True).is_visible()
    assert re.search(r"(accepted|rejected): u \d", page.locator(".caption").text_content())
    before = page.evaluate(PICTURE)
    page.wait_for_timeout(400)
    assert page.evaluate(PICTURE) == before


def test_step_back_and_scrub_agree(visit: Visit) -> None:
    page = visit()
    page.locator(".board").focus()
    press(page, "Home")
    pictures = [page.evaluate(PICTURE)]
    for _ in range(12):
        press(page, "ArrowRight")
        pictures.append(page.evaluate(PICTURE))
    assert len(set(pictures)) == 13
    for expected in reversed(pictures[:-1]):
        press(page, "ArrowLeft")
        assert page.evaluate(PICTURE) == expected
    slider = page.locator('[data-part="scrub"]')
    for place in (7, 12, 3, 7):
        slider.evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change')); }",
            place,
        )
        assert page.evaluate(PICTURE) == pictures[place]


def test_keyboard(visit: Visit) -> None:
    page = visit()
    page.locator(".board").focus()
    press(page, "Home")
    assert cursor(page) == "0.0"
    press(page, "ArrowRight")
    assert cursor(page) == "0.1"
    press(page, "ArrowDown")
    assert cursor(page) == "1.0"
    press(page, "ArrowUp")
    assert cursor(page) == "0.0"
    press(page, "End")
    assert page.locator(".board").get_attribute("data-phase") == "commit"
    press(page, "Home", " ")
    page.locator('[data-part="play"][data-on="false"]').wait_for(timeout=10_000)
    assert page.locator(".board").get_attribute("data-phase") == "draft", "it stops where the phase ends"
    assert cursor(page) != "0.0"


def test_a_click_on_a_token_goes_to_its_decision(visit: Visit) -> None:
    page = visit()
    token = page.locator('.round .tok[data-round="1"]').last
    token.click()
    assert cursor(page).startswith("1.")
    assert page.locator(".board").get_attribute("data-phase") == "decide"


def test_decisions_are_spoken(visit: Visit) -> None:
    page = visit()
    speech = page.locator("[aria-live]")
    assert speech.get_attribute("aria-live") == "polite"
    assert re.match(r"Token '.*' (accepted|rejected): u ", speech.text_content())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(visit: Visit, scheme: str) -> None:
    page = visit(color_scheme=scheme)
    assert page.locator(".board").get_attribute("data-theme") == scheme
    ink, ground = page.locator(".board").evaluate(
        "e => [getComputedStyle(e).color, getComputedStyle(document.querySelector('.stApp')).backgroundColor]"
    )
    assert contrast(ink, ground) > 7
    for part in (".caption", ".phases li[data-when=future] small", ".legend li", ".tok.prompt", ".note"):
        color = page.locator(f".board {part}").first.evaluate("e => getComputedStyle(e).color")
        assert contrast(rgb_of(page, color), ground) > 4.5, part


def rgb_of(page: Any, color: str) -> str:
    """Any CSS colour as rgb(), through a canvas."""
    script = """c => { const g = new OffscreenCanvas(1, 1).getContext('2d'); g.fillStyle = c; g.fillRect(0, 0, 1, 1);
      return 'rgb(' + [...g.getImageData(0, 0, 1, 1).data].slice(0, 3).join(', ') + ')'; }"""
    found: str = page.evaluate(script, color)
    return found


def contrast(one: str, two: str) -> float:
    """Contrast ratio of two rgb() colours, as WCAG defines it."""

    def luminance(color: str) -> float:
        parts = [int(n) / 255 for n in re.findall(r"\d+", color)[:3]]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_reduced_motion_moves_nothing(visit: Visit) -> None:
    page = visit(reduced_motion="reduce")
    page.locator(".board").focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        assert page.locator(".board").get_attribute("data-moving") is None
    assert cursor(page) == "0.4"


@pytest.mark.parametrize("width", [1360, 800, 400])
def test_nothing_is_wider_than_the_page(visit: Visit, width: int) -> None:
    page = visit(viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overflow = page.locator(".board").evaluate("e => e.scrollWidth - e.clientWidth")
    assert overflow <= 0


def test_sessions_do_not_share_what_they_look_at(visit: Visit) -> None:
    one, two = visit(), visit(f"?recording={recorded.names()[-1].capitalize()}")
    first = one.evaluate(PICTURE)
    assert two.evaluate(PICTURE) != first
    two.locator(".board").focus()
    press(two, "End")
    assert one.evaluate(PICTURE) == first


def test_hostile_text_is_shown_and_does_nothing(
    visit: Visit, make_trace: Callable[..., Any], tmp_path: Path, hostile_words: list[str]
) -> None:
    path = tmp_path / "hostile.jsonl"
    make_trace((3, 2, 1), words=hostile_words, tokens=40).write(path)
    page = visit()
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog opened: {dialog.message}"))
    title = page.title()
    upload(page, path, '.tok:has-text("<img·src=x")')
    page.locator(".board").focus()
    press(page, "Home", "ArrowRight", "ArrowRight", "ArrowRight", "End")
    assert page.locator(".board img, .board script").count() == 0
    assert page.title() == title
    shown = page.locator(".stream").text_content()
    assert "<script>" in shown and "⟨202E⟩" in shown
    assert not re.search("[\u0000-\u001f\u202a-\u202e\u2066-\u2069]", shown)


def test_a_bad_upload_is_one_line(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"type":"header"}\n{"type":"footer"}\n', encoding="utf-8")
    page = visit()
    upload(page, path, '[data-testid="stAlert"]')
    message = page.locator('[data-testid="stAlert"]')
    assert "expected a valid header on line 1" in message.text_content()
    assert page.locator(".board").is_visible()


@pytest.mark.parametrize("branching", [(4, 3, 2, 1), (6, 6, 6)], ids=["65 nodes", "259 nodes"])
def test_a_frame_is_drawn_in_time(
    visit: Visit, make_trace: Callable[..., Any], tmp_path: Path, branching: tuple[int, ...]
) -> None:
    path = tmp_path / "wide.jsonl"
    make_trace(branching, level=2, tokens=12).write(path)
    page = visit()
    upload(page, path, ".board .node >> nth=60")
    page.locator('[data-part="autopause"]').uncheck()
    page.locator('[data-part="speed"]').select_option("1")
    page.locator(".board").focus()
    press(page, "Home")
    page.keyboard.press(" ")
    page.locator(".board[data-frame-cost]").wait_for()
    page.locator('.board[data-phase="decide"]').wait_for()
    assert float(page.locator(".board").get_attribute("data-frame-cost")) < 8


def test_live_run(visit: Visit, embedded: Path) -> None:
    page = visit()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("At most this many tokens").fill("6")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    page.get_by_label("Your prompt").fill("Say hello.")
    page.get_by_role("button", name="Run live").click()
    page.get_by_role("button", name="Cancel").wait_for()
    page.get_by_role("button", name="Run live").wait_for(timeout=60_000)
    page.get_by_text(re.compile(r"^[1-6] tokens in")).wait_for(timeout=60_000)
    assert "Say·hello." in page.locator(".stream").text_content()
    page.locator(".board").focus()
    press(page, "End")
    assert page.locator(".board").get_attribute("data-phase") == "commit"
