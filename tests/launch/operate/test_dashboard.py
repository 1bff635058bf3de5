"""The live line and the tables, from a status as the supervisor sends it."""

import io

import msgspec
import pytest
from rich.console import Console

from launch.operate.control_messages import ActorStatus, DeviceStatus, RingStatus, RunStatus
from launch.operate.dashboard import LiveLine, fit, format_time, render

STATUS = RunStatus(
    run_dir="/runs/a",
    state="running",
    uptime_s=80.0,
    step=6,
    num_steps=10,
    num_skipped=1,
    loss=0.25,
    acceptance=1.5,
    best_acceptance=1.625,
    best_step=4,
    best_unary=None,
    best_oracle=None,
    target_tokens_per_s=5.0,
    drafter_tokens_per_s=0.0,
    verdict="drafter bound",
    targets_waiting=0.25,
    drafters_waiting=0.0,
    time_left_s=82.0,
    restarts=2,
    actors=[],
    rings=[RingStatus(target="target-0", slots=["free", "ready"]), RingStatus(target="target-1", slots=["free", "free"])],
)
EARLY = msgspec.structs.replace(STATUS, step=0, num_steps=None, loss=None, acceptance=None, verdict=None, time_left_s=None)


def test_a_line_every_ten_seconds_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    live = LiveLine()
    now[0] += 9.0
    live.show(lambda: EARLY)
    assert capsys.readouterr().out == ""
    now[0] += 1.0
    live.show(lambda: EARLY)
    expected = "step 0/?  loss -  acceptance -  tok/s 5 > 0  ring 1/4  -  restarts 2  left ?\n"
    assert capsys.readouterr().out == expected
    now[0] += 10.0
    live.show(lambda: STATUS)
    verdict = "drafter bound (targets wait 25%, drafters 0%)"
    expected = f"step 6/10  loss 0.2500  acceptance 1.50  tok/s 5 > 0  ring 1/4  {verdict}  restarts 2  left 0:01:22\n"
    assert capsys.readouterr().out == expected


def test_the_tables_show_the_best_checkpoint_and_skipped_steps() -> None:
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as captured:
        console.print(render(STATUS))
        console.print(render(EARLY))
    text = captured.get()
    assert "step 6/10  loss 0.2500  acceptance 1.50 (best 1.62 at step 4)  skipped 1\n" in text
    assert "ring of target-0  free ready\n" in text
    assert text.count("drafter bound (targets wait 25%, drafters 0%)") == 1


def test_the_tables_show_every_device_of_an_actor() -> None:
    times = {"pid": 7, "uptime_s": 1.0, "progress_age_s": 0.5, "restarts": 0, "lost_s": 0.0, "last_exit": None}
    split = [DeviceStatus("cuda:0", 0.95, 71 * 2**30), DeviceStatus("cuda:1", 0.5, 2**30)]
    actors = [
        ActorStatus(name="target-0", state="ready", devices=split, **times),  # type: ignore[arg-type]
        ActorStatus(name="drafter-0", state="ready", devices=[DeviceStatus("cuda:2")], **times),  # type: ignore[arg-type]
    ]
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as captured:
        console.print(render(msgspec.structs.replace(STATUS, actors=actors)))
    assert "0.5 s ago  cuda:0 95% 71.0 GiB, cuda:1 50% 1.0 GiB" in captured.get()
    assert "0.5 s ago  cuda:2" in captured.get()


def test_the_tables_show_what_the_selector_adds() -> None:
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as captured:
        console.print(render(msgspec.structs.replace(STATUS, best_unary=1.5, best_oracle=2.25)))
    assert "acceptance 1.50 (best 1.62 at step 4, unary 1.50, oracle 2.25)" in captured.get()


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0.4, "0:00:00"), (80.0, "0:01:20"), (16550.0, "4:35:50")])
def test_times_are_hours_minutes_and_seconds(seconds: float | None, text: str) -> None:
    assert format_time(seconds) == text


def test_line_fits_the_terminal() -> None:
    """The verdict goes without its shares first, then ring, verdict, restarts and so on; step and time left stay."""
    parts = {
        "step": "step 4/10",
        "loss": "loss 0.5000",
        "acceptance": "acceptance 1.50",
        "tok/s": "tok/s 100 > 50",
        "ring": "ring 1/4",
        "waiting": "drafter bound (targets wait 25%, drafters 0%)",
        "restarts": "restarts 0",
        "left": "left 1:22",
    }
    whole = "  ".join(parts.values())
    assert fit(parts, len(whole)) == whole
    for width in range(len(whole)):
        assert len(fit(parts, width)) <= width
    assert fit(parts, len(whole) - 1) == whole.replace(" (targets wait 25%, drafters 0%)", "")
    assert fit(parts, 79) == "step 4/10  loss 0.5000  acceptance 1.50  tok/s 100 > 50  restarts 0  left 1:22"
    assert fit(parts, 20) == "step 4/10  left 1:22"
    assert fit(parts, 4) == "step"
