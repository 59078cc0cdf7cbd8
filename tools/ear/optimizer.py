"""Muon for matrices, Adam for the rest, in float32 as a CPU computes it best."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.02
EPSILON = 1e-8
ORTHOGONAL = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
              (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))  # fmt: skip
"""Polynomials that bring the singular values of a matrix near 1 (You Jiacheng's, as in
modded-nanogpt)."""
SCALE = 0.2
"""Root mean square of a step of Adam, which Muon's is made to have."""


class Optimizer:
    """Steps and its state, for named parameters. What has two dimensions is a matrix, but for
    embeddings; kernels of convolutions are one of [out, in * width]."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._by_shape: dict[tuple[int, int], list[str]] = defaultdict(list)
        self._others: list[str] = []
        for name, parameter in parameters.items():
            if parameter.ndim >= 2 and "embed_tokens" not in name and "head." not in name:
                self._by_shape[parameter.shape[0], parameter[0].numel()].append(name)
            else:
                self._others.append(name)
        self.state: dict[str, Tensor] = {"steps": torch.zeros(())}
        for shape, names in self._by_shape.items():
            self.state[f"momentum.{shape[0]}.{shape[1]}"] = torch.zeros(len(names), *shape)
        for name in self._others:
            self.state[f"mean.{name}"] = torch.zeros_like(parameters[name].detach())
            self.state[f"square.{name}"] = torch.zeros_like(parameters[name].detach())

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Changes the parameters by their gradients, and forgets these."""
        self.state["steps"] += 1
        for shape, names in self._by_shape.items():
            gradients = torch.stack([self._gradient(name).reshape(shape) for name in names])
            momentum = self.state[f"momentum.{shape[0]}.{shape[1]}"]
            momentum.lerp_(gradients, 1 - MOMENTUM)
            directions = orthogonal(gradients.lerp(momentum, MOMENTUM))
            size = rate * SCALE * max(shape) ** 0.5
            for name, direction in zip(names, directions, strict=True):
                parameter = self._parameters[name]
                parameter.mul_(1 - rate * WEIGHT_DECAY)
                parameter.sub_(direction.reshape(parameter.shape), alpha=size)
        count = float(self.state["steps"])
        for name in self._others:
            gradient = self._gradient(name)
            mean, square = self.state[f"mean.{name}"], self.state[f"square.{name}"]
            mean.lerp_(gradient, 1 - BETAS[0])
            square.lerp_(gradient.square(), 1 - BETAS[1])
            spread = (square / (1 - BETAS[1] ** count)).sqrt_().add_(EPSILON)
            self._parameters[name].sub_(mean / (1 - BETAS[0] ** count) / spread, alpha=rate)

    def _gradient(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter) if gradient is None else gradient


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns] with the same singular vectors and singular values of about 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    made = matrices.mT if tall else matrices
    made = made / (made.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in ORTHOGONAL:
        gram = made @ made.mT
        made = torch.baddbmm(made, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), made, beta=a)
    return made.mT if tall else made
