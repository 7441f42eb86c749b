"""Muon for many small matrices: all matrices of one shape are orthogonalised together, in float32.

torch.optim.Muon goes matrix by matrix in bfloat16, which an AVX2 CPU has to emulate. The update rule is the same.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# Newton-Schulz coefficients and iterations of Muon, as in torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7


class Muon:
    """Orthogonalised momentum, for the 2-D weights of hidden layers."""

    def __init__(self, parameters: Iterable[Tensor], momentum: float) -> None:
        self._momentum = momentum
        self._groups: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self._buffers = {shape: group[0].new_zeros(len(group), *shape) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step along the gradients of the parameters."""
        for shape, group in self._groups.items():
            gradients = torch.stack([_gradient(parameter) for parameter in group])
            buffer = self._buffers[shape].lerp_(gradients, 1 - self._momentum)
            # Nesterov momentum.
            updates = orthogonalised(gradients.lerp_(buffer, self._momentum))
            # As torch.optim.Muon by default: larger steps for matrices with more rows than columns.
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, update in zip(group, updates.unbind(), strict=True):
                parameter.add_(update, alpha=-learning_rate * scale)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Approximately the nearest orthogonal matrix to each of [count, rows, columns], by Newton-Schulz iterations."""
    # On the wide orientation, whose Gram matrix is the smaller one.
    wide = matrices.shape[1] <= matrices.shape[2]
    turned = matrices if wide else matrices.transpose(1, 2)
    turned = turned / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = turned @ turned.transpose(1, 2)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        turned = torch.baddbmm(turned, polynomial, turned, beta=a)
    return turned if wide else turned.transpose(1, 2)


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
