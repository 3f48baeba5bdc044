"""The bench runs from end to end on a CPU, says that its figures mean nothing there, and survives what may go wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from specdecode_kernels import launch
from specdecode_kernels.bench import __main__ as bench
from specdecode_kernels.bench import attention, checks, goals, loop, model, peers, run
from specdecode_kernels.bench.stand import Case, Figures, Record, Skip, Stand, outcome

from specdecode_ref.batched import tree_attention as reference


def fine(stand: Stand) -> Figures:
    return {"microseconds": 1.0}


def fails(stand: Stand) -> Figures:
    raise ValueError("two\nlines")


def skips(stand: Stand) -> Figures:
    raise Skip("no room")


def full(stand: Stand) -> Figures:
    raise torch.OutOfMemoryError("CUDA out of memory")


def dies(stand: Stand) -> Figures:
    os._exit(7)


def hangs(stand: Stand) -> Figures:
    time.sleep(60)
    return {}


def rough(smoke: bool) -> Iterator[Case]:
    """A run in which much goes wrong."""
    for name, case in {"1": fine, "2": fails, "3": dies, "4": hangs, "5": fine, "peer": dies}.items():
        yield Case("checks", name, case, peer=name == "peer")


def steady(smoke: bool) -> Iterator[Case]:
    """Two cases, the first of which fails."""
    yield Case("checks", "1", fails)
    yield Case("checks", "2", fine)


def test_a_smoke_run_runs_everything_and_claims_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "smoke.json"
    assert bench.main(["--smoke", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["schema"] == bench.SCHEMA and found["label"] == bench.SMOKE and found["measured"] is False
    assert {"card", "driver", "torch", "triton", "command"} <= found["environment"].keys()
    assert list(dict.fromkeys(case["section"] for case in found["cases"])) == list(run.SECONDS)
    assert all("figures" not in case and "smoke_figures" in case for case in found["cases"])
    assert {case["status"] for case in found["cases"]} == {"ok", "skipped"}
    assert all("needs a GPU" in case["reason"] for case in found["cases"] if case["status"] == "skipped")
    assert {goal["verdict"] for goal in found["goals"]} == {"not measured"}
    shown = capsys.readouterr()
    assert re.search(f"{bench.SMOKE}; [0-9]+ ok, 4 skipped$", shown.out.rstrip())
    assert not re.search(r"[0-9] (µs|GB/s|tokens/s)|goal", shown.out)
    assert not shown.err


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == bench.NOTHING_RUN
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "no CUDA device" in shown.err and not shown.out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench.main([]) == bench.NOTHING_RUN
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setattr(launch, "interpreted", lambda kernel: False)
    assert bench.main(["--smoke"]) == bench.NOTHING_RUN
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "--smoke"], "not allowed with argument"),
        (["--bandwidth", "3"], "--bandwidth goes with --model"),
        (["--model", "--bandwidth", "0"], "a bandwidth above 0 is wanted, not 0"),
        (["--model", "--bandwidth", "nan"], "a bandwidth above 0"),
        (["--model", "--bandwidth", "fast"], "invalid"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == bench.NOTHING_RUN and complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--smoke"])
@pytest.mark.parametrize("place", ["", ".", "missing/file.json"])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    option: str, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "here", lambda: pytest.fail("it ran"))
    assert bench.main([option, "--json", place]) == bench.NOTHING_RUN
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "cannot be written" in shown.err
    assert not list(tmp_path.iterdir())


def test_a_file_that_can_no_longer_be_written_costs_no_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "there"
    folder.mkdir()

    def records() -> Iterator[Record]:
        (folder / "out.json").unlink()
        folder.rmdir()
        yield Record("checks", "one", "ok")

    monkeypatch.setattr(run, "here", records)
    assert bench.main(["--smoke", "--json", str(folder / "out.json")]) == bench.FAILED
    shown = capsys.readouterr()
    assert "cannot be written" in shown.err and "one" in shown.out


def test_an_interrupt_keeps_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def records() -> Iterator[Record]:
        yield Record("checks", "one", "ok")
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "here", records)
    path = tmp_path / "out.json"
    assert bench.main(["--smoke", "--json", str(path)]) == bench.INTERRUPTED
    assert [case["name"] for case in json.loads(path.read_text())["cases"]] == ["one"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_worker_leaves_an_interrupt_to_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C reaches both; only the parent has something to say."""

    def plan(smoke: bool) -> Iterator[Case]:
        yield Case("checks", "interrupted", lambda stand: os.kill(os.getpid(), signal.SIGINT) or {})
        yield Case("checks", "next", fine)

    _, *records = run.apart(plan, smoke=True, start_by="fork")
    assert [r.status for r in records if isinstance(r, Record)] == ["ok", "ok"]
    assert not capfd.readouterr().err


def test_the_model_is_labelled_and_counts_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    assert bench.main(["--model", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["label"] == model.LABEL and found["measured"] is False and model.LABEL in capsys.readouterr().out
    rows = {row["case"]: row for row in found["rows"]}
    times = rows["verify_chain B=64"]["model_microseconds"]
    assert times["H100"] == pytest.approx(rows["verify_chain B=64"]["bytes_moved"] / 3.35e6)
    assert bench.main(["--model", "--bandwidth", "2.0", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["terabytes_per_second"] == {"2.0 TB/s": 2.0}


def test_bytes_a_request_and_token_are_those_of_the_design() -> None:
    """Ours takes 10 to 14, the fused pipeline about 20, the one with a copy about 100."""
    vocab, batch = 128256, 64
    least, most = (model.verify_bytes("chain", batch, 4, vocab, 2, r) / vocab / batch for r in (0, batch))
    assert 10 <= least < 10.2 and 14 <= most < 14.2
    assert peers.bytes_moved("fused", batch, 4, vocab, 2, batch) / vocab / batch == pytest.approx(20)
    assert peers.bytes_moved("mrv2", batch, 4, vocab, 2, batch) / vocab / batch == pytest.approx(100)


def test_a_case_ends_in_a_record_whatever_happens() -> None:
    stand = Stand(smoke=True)
    found = [outcome(Case("checks", "c", case), stand) for case in (fine, fails, skips, full)]
    assert [record.status for record in found] == ["ok", "failed", "skipped", "skipped"]
    assert [record.reason for record in found] == ["", "ValueError: two lines", "no room", "out of memory"]
    assert outcome(Case("checks", "c", fails, peer=True), stand).status == "skipped"


def test_a_worker_that_dies_or_hangs_costs_one_case() -> None:
    about, *records = run.apart(rough, smoke=True, patience=1.5, start_by="fork")
    assert isinstance(about, dict) and about["torch"] == torch.__version__
    assert all(isinstance(record, Record) for record in records)
    found = {record.name: (record.status, record.reason) for record in records if isinstance(record, Record)}
    assert list(found) == ["1", "2", "3", "4", "5", "peer"]
    assert found["1"][0] == found["5"][0] == "ok" and found["2"] == ("failed", "ValueError: two lines")
    assert found["3"] == ("failed", "its process ended (7)") and found["4"] == ("failed", "no word in 2 s")
    assert found["peer"][0] == "skipped"


def test_a_worker_whose_device_no_longer_answers_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_answers", lambda stand: False)
    _, *records = run.apart(steady, smoke=True, start_by="fork")
    assert [(r.name, r.status) for r in records if isinstance(r, Record)] == [("1", "failed"), ("2", "ok")]


def test_a_worker_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "environment", lambda smoke: os._exit(9))
    (record,) = run.apart(steady, smoke=True, start_by="fork")
    assert isinstance(record, Record) and record.reason == "its process ended (9)"


def test_no_case_begins_after_the_time_of_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SECONDS", {"checks": -1})
    _, *records = run.apart(rough, smoke=True, start_by="fork")
    assert {record.reason for record in records if isinstance(record, Record)} == {
        "the time of its section was used up"
    }
    assert len(records) == 6


def test_a_failure_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "here", lambda: iter([Record("checks", "one", "failed", "it broke")]))
    assert bench.main(["--smoke"]) == bench.FAILED
    assert capsys.readouterr().err == "failed: checks: one: it broke\n"


def test_a_wrong_kernel_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.sampling.pick
    monkeypatch.setattr(checks.sampling, "pick", lambda *arguments: (right(*arguments) + 1) % 67)
    record = outcome(Case("checks", "pick", checks._pick), Stand(smoke=True))
    assert record.status == "failed" and "the reference has" in record.reason


def test_an_edge_excuses_the_next_token_only() -> None:
    law = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    assert not checks._same_or_near(law, 0.3, 1, 1e-6, "")
    assert checks._same_or_near(law, 0.25 + 1e-8, 0, 1e-6, "")
    for u, token in ((0.3, 0), (0.25, 2), (0.3, -1)):
        with pytest.raises(ValueError, match="the reference has"):
            checks._same_or_near(law, u, token, 1e-6, "")


def test_goals_are_judged_by_what_was_found() -> None:
    records = [
        Record("bandwidth", "copy", "ok", figures={"gigabytes_per_second": 3000.0}),
        Record("verify", "verify_chain B=64", "ok", figures={"microseconds": 40.0, "gigabytes_per_second": 2500.0}),
        Record("verify", "torch.compile reference B=64", "ok", figures={"microseconds": 160.0}),
        Record("verify", "mrv2-style pipeline B=64", "failed", "broken"),
        Record("attention", f"tree_attention {attention.Shape(1, 1, 8192)}", "ok", figures={"microseconds": 20.0}),
        Record("attention", f"tree_attention {attention.Shape(1, 16, 8192)}", "ok", figures={"microseconds": 22.0}),
    ]
    found = {goal.goal: (goal.found, goal.verdict) for goal in goals.goals(records, "NVIDIA H100 80GB HBM3")}
    assert found["verify B=64: ≥ 80% of copy bandwidth"] == ("83.3%", "met")
    assert found["verify B=64 on H100: ≤ 48 µs"] == ("40 µs", "met")
    assert found["verify B=64: ≥ 5x the torch.compile reference"] == ("4x", "missed")
    assert found["verify B=64: ≥ 4x the mrv2-style pipeline"] == ("", "not measured")
    assert found["tree attention: t(16) / t(1) ≤ 1.15 from 8k, the worst"] == ("1.1", "met")
    shown = bench.report({"card": "NVIDIA H100"}, records, smoke=False)
    assert shown["cases"][1]["figures"]["share_of_copy_bandwidth"] == pytest.approx(2500 / 3000)


def test_every_goal_names_cases_that_exist() -> None:
    names = {(case.section, case.name) for case in run.cases(smoke=False)}
    every = [
        Record(s, n, "ok", figures=dict.fromkeys(KEYS, 1.0) | {"plain": SIDE, "speculative": SIDE}) for s, n in names
    ]
    judged = goals.goals(every, "NVIDIA H200")
    assert [goal.goal for goal in judged if goal.verdict == "not measured"] == [
        "CPU: interpreter suite ≤ 120 s",
        "CPU: default shapes compiled for sm_90 ≤ 60 s",
    ]
    assert len(names) == sum(1 for _ in run.cases(smoke=False)), "a name stands for one case"


KEYS = (
    "microseconds",
    "gigabytes_per_second",
    "cache_gigabytes_per_second",
    "law_total_variation",
    "share_of_predicted",
)
SIDE = {"host_gap_share": 0.01, "round_is_one_graph": True}


class Replay:
    """A CUDA graph and its events as far as the clock looks at them: every replay takes 3 ms."""

    def __init__(self, **_: bool) -> None: ...
    def replay(self) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: Replay) -> float:
        return 3.0


def test_the_clock_divides_by_the_calls_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDAGraph", "Event"):
        monkeypatch.setattr(torch.cuda, name, Replay)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    stand = Stand(smoke=True)
    stand.smoke = False
    called: list[str] = []
    found = stand.timed(
        [partial(called.append, "a"), partial(called.append, "b")], 10**6, before=lambda: called.append("-"), launches=6
    )
    assert "".join(called) == "ab" + "ababab" + "-" * 11, "each once, then captured; ahead of every replay"
    assert found["microseconds"] == 500 and found["gigabytes_per_second"] == 2


def test_attention_of_the_peers_is_attention() -> None:
    made = attention.inputs(Stand(smoke=True), attention.Shape(2, 5, 70, 4, 2, 16), dtype=torch.float32)
    q, keys, values, lengths, ancestors = made
    wanted = reference.tree_attention(*made)
    mask = peers.dense_mask(lengths, ancestors, keys.shape[2], q.dtype, 2)
    torch.testing.assert_close(peers.dense_attention(q, keys, values, mask), wanted, rtol=1e-4, atol=1e-5)
    slots = torch.arange(keys.shape[2])
    sees = peers.flex_mask(lengths, ancestors, keys.shape[2]).mask_mod  # type: ignore[attr-defined]
    dense = [[[bool(sees(b, 0, i, slot)) for slot in slots] for i in torch.arange(5)] for b in torch.arange(2)]
    assert torch.equal(torch.tensor(dense), mask[:, 0, :5] == 0)


def test_synthetic_acceptance_is_what_it_says() -> None:
    """Through the real verification: the mean path is that of a chain whose tokens pass with probability alpha."""
    stand = Stand(smoke=True)
    drafter = loop.Synthetic(24, 2, 0.7, loop.random_model(stand, loop.SMALL, torch.float32))
    text = loop.drafting.Text(
        tokens=torch.zeros(24, 4, dtype=torch.int64),
        total=torch.full((24,), 2),
        limits=torch.full((24,), 9),
        sequences=torch.arange(24),
        seed=4,
        rules=checks.Rules.of([loop.RULE] * 24),
    )
    drafts = drafter.propose(text)
    logits = torch.randn(24, 3, loop.SMALL["vocab_size"], generator=torch.Generator().manual_seed(1))
    logits[..., 0] = -9
    drawing = torch.full((24, 3), 0.5, dtype=torch.float64)
    lengths = checks.verify.verify_chain(logits, drafts, text.rules, drawing, drawing).length
    wished = (drafts.tokens[:, 1:] == 1).long().cumprod(1).sum(1) + 1
    assert torch.equal(lengths, wished)
    assert 1.7 < float(lengths.double().mean()) < 2.6, "1 + alpha + alpha^2 is 2.19"
