"""A run from the start of its first process to the end of its last."""

import logging
import signal
import traceback
from pathlib import Path

from common.actor.board import Board
from common.config import Config
from common.ring.slot_table import SlotTable
from launch.arguments import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_SIGNAL
from launch.operate.control_messages import RunStatus
from launch.operate.control_server import ControlServer
from launch.operate.dashboard import LiveLine
from launch.operate.log_file import last_lines, last_message
from launch.operate.pace import Pace
from launch.operate.report import Ending
from launch.operate.status import Gauges
from launch.operate.supervisor import Supervisor
from launch.operate.topology import Topology, create_memory

_NUM_LAST_LINES = 12
log = logging.getLogger(__name__)


def run(config: Config, topology: Topology, run_dir: Path) -> tuple[Ending, RunStatus]:
    """Run the actors to the end of the last; return why the run ended, and its last state."""
    fds = create_memory(topology)
    board = Board(fds.board, len(topology.actors))
    table = SlotTable(fds.control, config.num_targets * config.ring.num_slots)
    supervisor = Supervisor(config, topology, fds, board, run_dir)
    pace, live = Pace(topology, board), LiveLine()
    gauges = Gauges(run_dir, supervisor, board, table, pace)
    server = ControlServer(run_dir, supervisor, gauges.read)

    def on_tick() -> None:
        pace.observe()
        live.show(gauges.read)
        server.serve()

    try:
        ending = _explain(supervisor, finished=supervisor.run(on_tick))
    except Exception as error:
        log.exception("the supervisor failed")
        lines = traceback.format_exc().splitlines()[-_NUM_LAST_LINES:]
        ending = Ending("supervisor failed", EXIT_FAILED, f"{type(error).__name__}: {error}", None, lines)
    finally:
        server.close()
        live.end()
    pace.observe()
    return ending, gauges.read()


def _explain(supervisor: Supervisor, *, finished: bool) -> Ending:
    culprit = supervisor.culprit
    if culprit is None:
        if finished:
            return Ending("done", EXIT_DONE)
        return Ending("stopped", EXIT_SIGNAL + supervisor.signum, f"signal {signal.Signals(supervisor.signum).name}")
    name = culprit.spec.name
    if supervisor.is_bad_input:
        return Ending("bad input", EXIT_BAD_INPUT, f"{name}: {last_message(culprit.log)}", name, last_lines(culprit.log, 1))
    return Ending("gave up", EXIT_FAILED, supervisor.failure, name, last_lines(culprit.log, _NUM_LAST_LINES))
