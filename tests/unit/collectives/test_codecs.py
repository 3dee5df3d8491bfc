"""What lossy wires may and may not do to gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lightning_llmscale.collectives.codecs import BFloat16, Codec, Int8Blocks, encode_with_feedback, make_codec
from lightning_llmscale.collectives.reducer import ReducerOptions
from lightning_llmscale.errors import ConfigurationError
from tests.unit.collectives.threads_world import one_host, open_everywhere, run_ranks, two_hosts

CODECS: list[Codec] = [BFloat16(), Int8Blocks()]
LENGTHS = [0, 1, 255, 256, 257, 1000, 65_536, 70_001]


def through(codec: Codec, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    wire = torch.empty(codec.wire_bytes(values.numel()), dtype=torch.uint8)
    encode_with_feedback(codec, values.clone(), wire, residual)
    decoded = torch.empty_like(values)
    codec.decode(wire, decoded)
    return decoded


def reduce_rank(reducers, tensors, scale, stream, rank) -> None:  # type: ignore[no-untyped-def]
    reducers[rank].all_reduce(tensors[rank], scale, stream)


def drawn(length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_comes_back_within_the_precision_of_the_wire(codec: Codec, length: int) -> None:
    values = drawn(length)
    decoded = through(codec, values)
    if codec.name == "bf16":
        assert torch.equal(decoded, values.bfloat16().float())
    elif length:
        # Half a step of the block's scale, found here from the definition: blocks are the columns of rows of 256.
        padded = torch.nn.functional.pad(values, (0, -length % 256)).view(-1, 256)
        half_steps = (padded.abs().amax(0) / 254).repeat(padded.shape[0])[:length]
        assert bool(((decoded - values).abs() <= half_steps * 1.001).all())


def test_bytes_on_the_wire() -> None:
    assert BFloat16().wire_bytes(1000) == 2000
    assert Int8Blocks().wire_bytes(65_536) == 65_536 + 1024
    assert Int8Blocks().wire_bytes(0) == 0


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 300, 999])
def test_a_non_finite_value_arrives_as_non_finite(codec: Codec, value: float, place: int) -> None:
    values = drawn(1000)
    values[place] = value
    decoded = through(codec, values)
    assert not decoded[place].isfinite()
    assert decoded.isfinite().sum() >= 1000 - 4  # a block of at most four values here


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("values", [torch.zeros(600), torch.full((600,), 1e-42), torch.full((600,), 3e38)])
def test_extreme_magnitudes_stay_finite(codec: Codec, values: torch.Tensor) -> None:
    torch.testing.assert_close(through(codec, values), values, rtol=5e-3, atol=1e-32)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_with_feedback_the_errors_of_many_steps_do_not_add_up(codec: Codec) -> None:
    gradient = drawn(2000)
    residual = torch.zeros_like(gradient)
    sent = sum(through(codec, gradient, residual).double() for _ in range(50))
    torch.testing.assert_close(sent + residual.double(), 50 * gradient.double(), rtol=1e-4, atol=1e-4)
    plain = sum(through(codec, gradient).double() for _ in range(50))
    assert (sent / 50 - gradient).norm() < 0.1 * (plain / 50 - gradient).norm()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_an_overflow_does_not_stay_in_the_residual(codec: Codec) -> None:
    gradient, residual = drawn(500), torch.zeros(500)
    gradient[3] = float("inf")
    through(codec, gradient, residual)
    assert bool(residual.isfinite().all())
    assert bool(through(codec, drawn(500), residual).isfinite().all())


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize(("algorithm", "hosts", "world_size"), [("direct", one_host, 3), ("two_level", two_hosts, 4)])
def test_lossy_sums_are_close_alike_on_all_ranks_and_unbiased_over_steps(algorithm, hosts, world_size, wire) -> None:  # type: ignore[no-untyped-def]
    options = ReducerOptions(wire=wire, error_feedback=True)
    reducers = open_everywhere(algorithm, hosts(world_size), options=options)
    gradients = [drawn(200_000 + rank)[:200_000] for rank in range(world_size)]
    mean = torch.stack(gradients).double().mean(0)
    total = torch.zeros_like(mean)
    for _ in range(10):
        tensors = [gradient.clone() for gradient in gradients]
        reduce = partial(reduce_rank, reducers, tensors, 1 / world_size, "bucket 0")
        run_ranks(world_size, reduce)
        for tensor in tensors[1:]:
            assert torch.equal(tensor, tensors[0])
        error = (tensors[0] - mean).norm() / mean.norm()
        assert error < {"bf16": 0.005, "int8": 0.03}[wire]
        total += tensors[0]
    assert (total / 10 - mean).norm() / mean.norm() < error / 3
    exact = [gradient.clone() for gradient in gradients]
    run_ranks(world_size, partial(reduce_rank, reducers, exact, 1 / world_size, None))
    torch.testing.assert_close(exact[0], mean.float(), rtol=1e-5, atol=1e-6)  # unnamed tensors are never encoded
    for reducer in reducers:
        reducer.close()


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_non_finite_gradient_reaches_all_ranks_and_no_later_step(wire) -> None:  # type: ignore[no-untyped-def]
    reducers = open_everywhere("direct", one_host(3), options=ReducerOptions(wire=wire, error_feedback=True))
    for value, finite in ((float("nan"), False), (1.0, True)):
        tensors = [torch.ones(1000) for _ in range(3)]
        tensors[1][[0, 500, 999]] = value
        run_ranks(3, partial(reduce_rank, reducers, tensors, 1 / 3, 0))
        for tensor in tensors:
            assert tensor[[0, 500, 999]].isfinite().tolist() == [finite] * 3
    for reducer in reducers:
        reducer.close()


def test_half_gradients_through_a_lossy_wire_are_refused() -> None:
    reducers = open_everywhere("direct", one_host(2), options=ReducerOptions(wire="int8"))
    with pytest.raises(ConfigurationError, match="wire='fp32'"):
        reducers[0].all_reduce(torch.ones(4, dtype=torch.bfloat16), 1.0, "bucket 0")
    for reducer in reducers:
        reducer.close()


def test_an_unknown_wire_names_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="'fp32', 'bf16', 'int8'"):
        make_codec("fp8")
