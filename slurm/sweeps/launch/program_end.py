"""How the program of a stage ended, told from its exit code and from what it has printed.

torchrun exits with 75 where its ranks have stopped (`sweeps.training.torchrun_agent`), and with 1
where they have failed or were killed, after a table of their exit codes. A run on several nodes has
a torchrun on each, and an srun above them, which exits with the highest code of all.
"""

import re
import signal
from dataclasses import dataclass

from sweeps.runs.stages import Outcome

# By torchrun, of ranks that have ended by themselves.
RANK_EXIT_CODE = re.compile(r"^ *exitcode *: (-?\d+)", re.MULTILINE)
# By srun, of the programs on its nodes.
NODE_EXIT_CODE = re.compile(r"^srun: error: .*: Exited with exit code (\d+)$", re.MULTILINE)
NODE_KILLED = re.compile(r"^srun: error: .*: Killed$", re.MULTILINE)
SRUN_KILLS = "\nsrun: First task exited "  # before it kills those that are left


@dataclass(frozen=True)
class ProgramEnd:
    """How a stage's program ended, and the last lines that it printed."""

    exit_code: int  # -9 for one that was killed by signal 9
    lines: list[str]
    nodes: int = 1  # on which it ran

    @property
    def telling_exit_code(self) -> int:
        """The exit code that tells most about the end, which torchrun and srun may hide.

        On one node it is that of the rank that ended first; on several see `_exit_code_of_nodes`.
        """
        if self.exit_code == 0:
            return 0
        if self.nodes > 1:
            return self._exit_code_of_nodes()
        if self.exit_code == 1:
            codes = RANK_EXIT_CODE.findall("\n".join(self.lines))
            if codes:
                return int(codes[-1])  # torchrun prints the first failure last
        return self.exit_code

    def _exit_code_of_nodes(self) -> int:
        """The exit code that tells most, of all that the ranks and the programs above them had.

        Where one rank has gone, those on other nodes lose their connection and fail or abort. So
        a stop or a kill counts before a failure, and a failure before an abort, in whatever order
        they are printed. What srun kills because another node has ended says nothing.
        """
        # Of srun's lines only those count that it printed before it killed the rest. The ranks' own
        # exit codes, which each torchrun prints in a table, count wherever they stand.
        # The "" puts a newline before the first line too, as SRUN_KILLS begins with one.
        before_kills, _, _ = "\n".join(["", *self.lines]).partition(SRUN_KILLS)
        ranks = [int(code) for code in RANK_EXIT_CODE.findall("\n".join(self.lines))]
        programs = [int(code) for code in NODE_EXIT_CODE.findall(before_kills)]
        if Outcome.STOPPED.value in [*ranks, *programs]:
            return Outcome.STOPPED.value
        kills = [code for code in ranks if code < 0 and code != -signal.SIGABRT]
        if NODE_KILLED.search(before_kills):
            kills.append(-signal.SIGKILL)
        failures = [code for code in [*ranks, *programs] if code > 0]
        if kills:
            return kills[0]
        if failures:
            return failures[0]
        if ranks:  # all of them have aborted
            return ranks[0]
        return self.exit_code
