"""The helper that runs tests on gloo processes carries back results and the first failure."""

import pytest
import torch
import torch.distributed as dist
from support.gloo import RankError, run_on_gloo


class LocalError(Exception):
    """Not picklable by its arguments."""

    def __init__(self, rank: int, *, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")


def sum_of_ranks(rank: int, offset: int) -> int:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return int(total)


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise LocalError(rank, reason="no luck")
    dist.barrier()


def test_results_come_back_by_rank() -> None:
    assert run_on_gloo(sum_of_ranks, 2, offset=10) == [21, 21]


def test_the_rank_that_failed_first_is_the_one_reported() -> None:
    with pytest.raises(RankError, match=r"error-1:(.|\n)*LocalError: rank 1: no luck"):
        run_on_gloo(fail_on_one, 2)
