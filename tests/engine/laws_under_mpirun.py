"""Run every law on the ranks of a job: mpirun -np 3 python tests/engine/laws_under_mpirun.py.

An argument is the number of examples of each law, 15 without it. Every rank draws the same ones,
and a failure on one is a failure on all, so none is left alone.
"""

import sys
import traceback

import torch
from hypothesis import HealthCheck, Phase, given, settings
from laws import LAWS, cases

import ddl

EXAMPLES = int(sys.argv[1]) if len(sys.argv) > 1 else 15


def check(law, comm) -> None:
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def holds_on_every_rank(case):
        try:
            law(comm, case)
            failure = None
        except AssertionError:
            failure = traceback.format_exc()
        failures = [other for other in ddl.gather_object(failure) if other]
        assert not failures, failures[0]

    holds_on_every_rank()


def main() -> int:
    torch.set_num_threads(1)
    comm = ddl.init(timeout=60)
    for law in LAWS:
        check(law, comm)
    if comm.rank == 0:
        print(f"{len(LAWS)} laws hold on {comm.size} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
