"""The learning rule against a slow reference written from the formulas of docs/learning.md, and the properties it must have."""

import math
import random

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from replayground.trainer.config import GrpoSettings, LossMode
from replayground.trainer.loss import (
    MODES,
    LossFigures,
    Tokens,
    excluded_tokens,
    policy_loss,
    rejection_mask,
    token_shares,
)

RULES = {mode: GrpoSettings(mode=mode, inner_steps=1) for mode in MODES}


def drawn(seed: int, count: int = 60, spread: float = 1.0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale

    mu = -normal(1.0).abs()
    prox = mu + normal(0.4 * spread)
    theta = (prox + normal(0.4 * spread)).requires_grad_()
    trajectory = torch.randint(0, 7, (count,), generator=generator).sort().values
    advantage = normal(1.0)[trajectory]
    mask = torch.rand(count, generator=generator) < 0.7
    share = token_shares(trajectory, mask, "token_mean", 1)
    return Tokens(theta, prox, mu, advantage, mask, trajectory, share)


def clamp(value: float) -> float:
    return max(-20.0, min(20.0, value))


def clipped(advantage: float, ratio: float, low: float, high: float) -> float:
    loss = max(-advantage * ratio, -advantage * max(1 - low, min(1 + high, ratio)))
    return min(loss, -3 * advantage) if advantage < 0 else loss


def reference_term(mode: LossMode, index: int, tokens: Tokens) -> float:
    """One token's loss, with mean log-ratios of its trajectory, straight from the formula."""
    theta, prox, mu = (float(x[index]) for x in (tokens.theta.detach(), tokens.prox, tokens.mu))
    advantage = float(tokens.advantage[index])
    rho = math.exp(clamp(prox - mu))
    weight, ratio = min(rho, 2.0), math.exp(clamp(theta - prox))
    if mode == "decoupled":
        return weight * clipped(advantage, ratio, 0.2, 0.28)
    if mode == "bypass":
        return clipped(advantage, math.exp(clamp(theta - mu)), 0.2, 0.28)
    if mode == "probability":
        moved = math.exp(theta) - math.exp(mu)
        keep = 0.0 if (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2) else 1.0
        return -keep * advantage * math.exp(clamp(theta - mu)) + 1e-3 * (theta - mu) ** 2
    if mode == "gspo":
        same = [
            float(tokens.theta.detach()[other] - tokens.prox[other])
            for other in range(len(tokens.mask))
            if tokens.trajectory[other] == tokens.trajectory[index] and tokens.mask[other]
        ]
        return weight * clipped(advantage, math.exp(clamp(sum(same) / len(same))), 3e-4, 4e-4)
    if mode == "cispo":
        return -weight * min(ratio, 1.28) * advantage * theta
    if mode == "m2po":
        if index in excluded_slowly(tokens, 0.04):
            return 0.0
        loss = -advantage * math.exp(clamp(theta - mu))
        return min(loss, -3 * advantage) if advantage < 0 else loss
    assert mode == "icepop"
    return (rho if 0.5 <= rho <= 2.0 else 0.0) * clipped(advantage, ratio, 0.2, 0.28)


def excluded_slowly(tokens: Tokens, mean_max: float) -> set[int]:
    """One by one, the largest square first, with all that equal it; everything is summed again each time."""
    logratio = [clamp(float(value)) for value in (tokens.theta.detach() - tokens.mu)]
    left = {
        index
        for index in range(len(logratio))
        if tokens.mask[index] and float(tokens.advantage[index]) * logratio[index] > 0
    }
    excluded: set[int] = set()
    while left and math.fsum(logratio[index] ** 2 for index in left) / len(left) > mean_max:
        largest = max(logratio[index] ** 2 for index in left)
        excluded |= {index for index in left if logratio[index] ** 2 == largest}
        left -= excluded
    return excluded


def loss_of(tokens: Tokens, rules: GrpoSettings) -> float:
    return float(policy_loss(tokens, rules)[0].detach())


def gradient(tokens: Tokens, rules: GrpoSettings) -> Tensor:
    (result,) = torch.autograd.grad(policy_loss(tokens, rules)[0], tokens.theta)
    return result


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("seed", range(16))
def test_a_mode_equals_the_slow_reference(mode: LossMode, seed: int) -> None:
    tokens = drawn(seed, spread=1.0 if seed % 4 else 30.0)  # wide spreads reach the clamps
    sampled = [index for index in range(len(tokens.mask)) if tokens.mask[index]]
    expected = sum(reference_term(mode, index, tokens) for index in sampled) / len(sampled)
    assert loss_of(tokens, RULES[mode]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", ["decoupled", "bypass", "probability", "gspo", "icepop", "m2po"])
@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_is_the_slope_of_the_loss(mode: LossMode, seed: int) -> None:
    tokens, step = drawn(seed), 1e-7
    slopes = gradient(tokens, RULES[mode])
    for index in range(0, len(slopes), 7):
        moved = [tokens.theta.detach().clone() for _ in range(2)]
        moved[0][index] -= step
        moved[1][index] += step
        low, high = (loss_of(_with(tokens, theta=theta), RULES[mode]) for theta in moved)
        assert float(slopes[index]) == pytest.approx((high - low) / (2 * step), abs=1e-6)


def test_cispo_has_the_gradient_of_its_weighted_log_likelihood() -> None:
    tokens = drawn(3)
    weight = (tokens.prox - tokens.mu).exp().clamp(max=2.0)
    ratio = (tokens.theta - tokens.prox).exp().clamp(max=1.28)
    expected = (-weight * ratio * tokens.advantage * tokens.share).detach()
    torch.testing.assert_close(gradient(tokens, RULES["cispo"]), expected)


def _with(tokens: Tokens, **changes: Tensor) -> Tokens:
    return Tokens(**{**vars(tokens), **changes})


def test_decoupled_equals_bypass_when_the_weights_that_sampled_are_the_ones_trained() -> None:
    tokens = drawn(1)
    tokens = _with(tokens, prox=tokens.mu)
    assert loss_of(tokens, RULES["decoupled"]) == loss_of(tokens, RULES["bypass"])
    torch.testing.assert_close(gradient(tokens, RULES["decoupled"]), gradient(tokens, RULES["bypass"]), rtol=0, atol=0)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_on_policy_the_gradient_is_minus_advantage_over_count(mode: LossMode) -> None:
    tokens = drawn(2)
    tokens = _with(tokens, prox=tokens.theta.detach(), mu=tokens.theta.detach())
    expected = torch.where(tokens.mask, -tokens.advantage / tokens.mask.sum(), 0.0)
    torch.testing.assert_close(gradient(tokens, RULES[mode]), expected)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_masked_tokens_have_no_gradient_and_do_not_matter(mode: LossMode) -> None:
    tokens = drawn(4)
    assert not gradient(tokens, RULES[mode])[~tokens.mask].any()
    noise = torch.where(tokens.mask, tokens.mu, tokens.mu - 5.0)
    assert loss_of(_with(tokens, mu=noise), RULES[mode]) == loss_of(tokens, RULES[mode])


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_micro_batches_add_up(mode: LossMode, aggregation: str) -> None:
    tokens = drawn(5)
    share, (excluded,) = (
        token_shares(tokens.trajectory, tokens.mask, aggregation, 16),
        excluded_tokens([tokens], RULES[mode]),
    )
    tokens = _with(tokens, share=share, excluded=excluded)
    whole, figures = policy_loss(tokens, RULES[mode])
    whole_gradient = gradient(tokens, RULES[mode])
    loss, summed, parts = 0.0, LossFigures(), torch.zeros_like(whole_gradient)
    for trajectory in torch.arange(7):
        chosen = tokens.trajectory == trajectory
        part = Tokens(**{name: value[chosen] for name, value in vars(tokens).items() if value is not None})
        part = _with(part, theta=part.theta.detach().requires_grad_(), trajectory=torch.zeros_like(part.trajectory))
        part_loss, part_figures = policy_loss(part, RULES[mode])
        loss, summed = loss + float(part_loss.detach()), summed + part_figures
        parts[chosen] = gradient(part, RULES[mode])
    assert loss == pytest.approx(float(whole.detach()), rel=1e-12)
    torch.testing.assert_close(parts, whole_gradient)
    assert vars(summed) == pytest.approx(vars(figures), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_m2po_excludes_what_the_slow_reference_excludes(seed: int) -> None:
    tokens = drawn(seed, count=200, spread=(0.1, 0.5, 1.0, 30.0)[seed % 4])
    rules = replace(RULES["m2po"], second_moment_max=(0.001, 0.04, 0.2)[seed % 3])
    (excluded,) = excluded_tokens([tokens], rules)
    assert set(excluded.nonzero().flatten().tolist()) == excluded_slowly(tokens, rules.second_moment_max)
    distance = (tokens.theta - tokens.mu).detach().clamp(-20, 20)
    kept = tokens.mask & (tokens.advantage * distance > 0) & ~excluded
    assert not kept.any() or float((distance[kept] ** 2).mean()) <= rules.second_moment_max
    assert not gradient(tokens, rules)[excluded].any()


def test_m2po_with_nothing_to_exclude_is_the_plain_loss_and_lets_the_rest_through() -> None:
    tokens = drawn(11, spread=0.01)
    plain = (
        torch.where(tokens.mask, -tokens.advantage * (tokens.theta - tokens.mu).exp(), 0.0).sum() / tokens.mask.sum()
    )
    assert loss_of(tokens, RULES["m2po"]) == pytest.approx(float(plain.detach()), rel=1e-12)
    # Far against the advantage: a clip would not act, so nothing is excluded however large the square.
    away = _with(tokens, theta=(tokens.mu - 3 * tokens.advantage.sign()).requires_grad_())
    assert not excluded_tokens([away], RULES["m2po"])[0].any()
    toward = _with(tokens, theta=(tokens.mu + 3 * tokens.advantage.sign()).requires_grad_())
    assert torch.equal(excluded_tokens([toward], RULES["m2po"])[0], tokens.mask)


def test_m2po_treats_equal_tokens_alike_in_any_order_and_any_split() -> None:
    tokens = drawn(12, count=90)
    rules = replace(RULES["m2po"], second_moment_max=0.1)
    # Only three sizes of a log-ratio, so that the bound falls among equal ones.
    sizes = torch.tensor([0.1, 0.25, 0.6], dtype=torch.float64)[torch.arange(90) % 3]
    mu = torch.full((90,), -1.0, dtype=torch.float64)
    tokens = _with(tokens, mu=mu, theta=(mu + sizes * tokens.advantage.sign()).requires_grad_())
    (whole,) = excluded_tokens([tokens], rules)
    squares = ((tokens.theta - tokens.mu).detach() ** 2)[tokens.mask]
    assert set(squares[whole[tokens.mask]].tolist()).isdisjoint(squares[~whole[tokens.mask]].tolist())
    assert 0 < int(whole.sum()) < int(tokens.mask.sum())
    order = torch.randperm(90, generator=torch.Generator().manual_seed(3))

    def chosen(places: Tensor) -> Tokens:
        return Tokens(**{name: value[places] for name, value in vars(tokens).items() if value is not None})

    parts = [chosen(places) for places in (order[:40], order[40:41], order[41:])]
    assert torch.equal(torch.cat(excluded_tokens(parts, rules)), whole[order])


def test_m2po_weighs_only_what_it_learns_from() -> None:
    tokens = drawn(13, count=400)
    _, figures = policy_loss(tokens, RULES["m2po"])
    learned = tokens.mask & (gradient(tokens, RULES["m2po"]) != 0)
    weight = torch.where(learned, (tokens.theta - tokens.mu).detach().exp(), 0.0)[tokens.mask]
    assert figures.effective_sample_size == pytest.approx(float(1 / ((weight / weight.mean()) ** 2).mean()))
    assert figures.clip_share == pytest.approx(1 - float(learned.sum() / tokens.mask.sum()))


def test_shares_of_each_aggregation() -> None:
    trajectory = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, False, True, True, False])  # the third trajectory has no sampled token

    def shares(kind: str) -> list[float]:
        return [float(share) for share in token_shares(trajectory, mask, kind, 10)]

    assert shares("token_mean") == [0.25, 0.25, 0, 0.25, 0.25, 0]
    assert shares("sequence_mean") == [0.25, 0.25, 0, 0.25, 0.25, 0]
    assert shares("constant_length") == pytest.approx([0.05, 0.05, 0, 0.05, 0.05, 0])
    assert token_shares(trajectory, torch.zeros(6, dtype=torch.bool), "token_mean", 10).sum() == 0


def test_nothing_sampled_gives_loss_and_gradient_zero() -> None:
    tokens = drawn(6)
    nothing = torch.zeros_like(tokens.mask)
    tokens = _with(tokens, mask=nothing, share=token_shares(tokens.trajectory, nothing, "token_mean", 1))
    loss, figures = policy_loss(tokens, RULES["decoupled"])
    assert float(loss.detach()) == 0.0
    assert not gradient(tokens, RULES["decoupled"]).any()
    assert (figures.clip_share, figures.k3_mean, figures.effective_sample_size) == (0.0, 0.0, 0.0)


def test_sequence_rejection_removes_a_trajectory_and_keeps_the_count() -> None:
    tokens = drawn(7)
    tokens = _with(tokens, mask=tokens.mask | (torch.arange(len(tokens.mask)) % 3 == 0))
    rules = replace(RULES["decoupled"], rejection_low=0.9, rejection_high=1.1)
    removed = rejection_mask(tokens, rules)
    for trajectory in torch.arange(7):
        same = tokens.trajectory == trajectory
        mean = float((tokens.prox - tokens.mu)[same & tokens.mask].mean().exp())
        assert bool(removed[same].all()) == (not 0.9 <= mean <= 1.1)
        assert removed[same].all() or not removed[same].any()
    kept = _with(tokens, mask=tokens.mask & ~removed)  # shares stay those of the whole step
    assert loss_of(tokens, rules) == pytest.approx(loss_of(kept, RULES["decoupled"]))
    assert removed.any()
    assert not removed.all()


def test_figures_say_what_the_clip_removed_and_how_far_the_policies_are_apart() -> None:
    tokens = drawn(8, count=2000)
    _, figures = policy_loss(tokens, RULES["decoupled"])
    without = gradient(tokens, RULES["decoupled"])[tokens.mask] == 0
    assert figures.clip_share == pytest.approx(float(without.double().mean()))
    distance = (tokens.theta - tokens.mu).detach()[tokens.mask]
    assert figures.k3_mean == pytest.approx(float((distance.exp() - distance - 1).mean()))
    weight = (tokens.prox - tokens.mu)[tokens.mask].exp().clamp(max=2)
    assert figures.effective_sample_size == pytest.approx(float(1 / ((weight / weight.mean()) ** 2).mean()))


def test_a_token_with_negative_advantage_never_costs_more_than_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(200):
        theta = torch.tensor([draw.uniform(-40, 40)], dtype=torch.float64, requires_grad=True)
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        tokens = Tokens(theta, zero, zero, -one, one.bool(), torch.zeros(1, dtype=torch.int64), one)
        assert loss_of(tokens, RULES["decoupled"]) <= 3.0


def test_divergence_and_entropy_are_added_to_every_mode_unweighted() -> None:
    tokens = drawn(14)
    entropy = torch.linspace(0.0, 2.0, len(tokens.mask), dtype=torch.float64)
    reference = (tokens.theta - 0.3 * torch.linspace(-1, 1, len(tokens.mask), dtype=torch.float64)).detach()
    with_both = _with(tokens, reference=reference, entropy=entropy)
    for mode in sorted(MODES):
        rules = replace(RULES[mode], reference_weight=0.2, entropy_weight=0.1, entropy_floor=0.5)
        added = 0.0
        for index in range(len(tokens.mask)):
            distance = clamp(float(reference[index] - tokens.theta.detach()[index]))
            k3 = math.exp(distance) - distance - 1
            added += bool(tokens.mask[index]) * (0.2 * k3 - 0.1 * min(float(entropy[index]), 0.5))
        expected = loss_of(tokens, rules) + added / int(tokens.mask.sum())
        assert loss_of(with_both, rules) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_rejected_context_has_no_gradient_of_any_kind() -> None:
    tokens = drawn(15)
    rules = replace(RULES["decoupled"], rejection_low=1e9, rejection_high=1e9, reference_weight=1.0)
    assert not gradient(_with(tokens, reference=tokens.prox), rules).any()
