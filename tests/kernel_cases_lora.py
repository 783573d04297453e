"""What adapters add by the table of their addresses, against the twin; collected by test_kernels."""

from functools import partial

import pytest
import torch
from kernel_pool import DEVICE, DTYPES, assert_same, random

from engine.models.lora import Delta
from engine.triton_kernels import twins as twin
from engine.triton_kernels.configs import LORA_SPLIT
from engine.triton_kernels.lora import lora_add


def table_of(deltas: dict[int, Delta], slots: int = 6) -> torch.Tensor:
    """[slots, 3] of the adapters in these slots."""
    table = torch.zeros(slots, 3, dtype=torch.int64)
    for slot, delta in deltas.items():
        table[slot] = torch.tensor([delta.a.data_ptr(), delta.b.data_ptr(), len(delta.a)])
    return table.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), [(24, 40), (96, 64), (LORA_SPLIT + 70, 130)])
def test_lora_add(width: int, outputs: int, dtype: torch.dtype) -> None:
    """Rows of four adapters whose ranks differ, of none, and of a slot that adds nothing here."""
    ranks = {1: 3, 2: 16, 3: 40, 5: 1}
    draws = partial(random, torch.Generator().manual_seed(width), dtype=dtype)
    deltas = {slot: Delta(draws(rank, width) * width**-0.5, draws(outputs, rank)) for slot, rank in ranks.items()}
    numbers = [0, 3, 1, 1, 4, 2, 0, 5, 3]
    x, y = draws(len(numbers), width), draws(len(numbers), outputs)
    slots = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    table, scratch = table_of(deltas), torch.full((-(-width // LORA_SPLIT), 12, 48), torch.nan, device=DEVICE)
    expected, found = y.clone(), y.clone()
    for slot, delta in deltas.items():
        places = torch.tensor([place for place, number in enumerate(numbers) if number == slot], device=DEVICE)
        delta.add(x, expected, places)
    lora_add(x, found, slots, table, scratch)
    assert_same(found, expected, dtype)
    for place in (0, 4, 6):
        assert torch.equal(found[place], y[place]), "nothing is added to it"
    if DEVICE.type == "cpu":  # addresses of a GPU's memory are nothing to the host
        ours = y.clone()
        twin.lora_add(x, ours, slots, table, scratch)
        assert_same(ours, expected, dtype)


def test_lora_add_of_no_rows_and_of_wrong_shapes() -> None:
    x, table = torch.zeros(0, 24, device=DEVICE), table_of({})
    slots, scratch = torch.zeros(0, dtype=torch.int32, device=DEVICE), torch.zeros(1, 4, 16, device=DEVICE)
    lora_add(x, x, slots, table, scratch)
    rows = torch.zeros(5, 24, device=DEVICE)
    for wrong in (slots, torch.zeros(5, dtype=torch.int32, device=DEVICE)):  # too few slots, too little scratch
        with pytest.raises(AssertionError):
            lora_add(rows, rows, wrong, table, scratch)
