"""From gradients to new parameters, without the host reading any value."""

import math

import torch

from .gradients import Gradients
from .optimizers import StaticOptimizer


class Update:
    """Averages, unscales, checks and clips gradients, then steps the optimizer or skips the update."""

    def __init__(
        self,
        optimizer: StaticOptimizer,
        gradients: Gradients,
        device: torch.device,
        *,
        clip_norm: float | None,
        scaler: torch.amp.GradScaler | None,
        average: bool,
    ) -> None:
        self._optimizer, self._gradients, self._clip_norm = optimizer, gradients, clip_norm
        self._scaler, self._average = scaler, average
        exact = torch.float64 if optimizer.has_doubles else torch.float32
        self._correction = torch.ones((), device=device, dtype=exact)
        self._given: float = 1.0
        # Whatever the default type is: fused optimizers take a flag in float32 only.
        self._held = torch.zeros((), device=device, dtype=torch.float32)
        self._one = torch.ones((), device=device, dtype=torch.float32)
        self._verdict = torch.zeros((), device=device, dtype=torch.float32)
        self.skipped = torch.zeros((), device=device, dtype=torch.float64)
        """Updates that were skipped."""
        self.norm = None if clip_norm is None else torch.zeros((), device=device, dtype=torch.float32)
        """The norm of all gradients at the last update."""
        if scaler is not None and scaler._scale is None:
            scaler._lazy_init_scale_growth_tracker(device)

    def state(self) -> dict[str, torch.Tensor]:
        """What an update changes besides parameters, gradients and the optimizer's state."""
        scaler = self._scaler
        own = {"skipped": self.skipped, "norm": self.norm}
        scales = {} if scaler is None else {"scale": scaler._scale, "growth": scaler._growth_tracker}
        return {name: tensor for name, tensor in {**own, **scales}.items() if tensor is not None}

    def numbers(self) -> list[float]:
        """What a graph of an update has baked in."""
        scaler = self._scaler
        if scaler is None:
            return []
        return [scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()]

    def hold(self, held: bool) -> None:
        """Whether updates leave parameters and the optimizer's state unchanged, as in trial runs."""
        self._held.fill_(float(held))

    def divide_by(self, micro_batches: int, accumulate: int) -> None:
        """Set the number of micro-batches of the next update; each was already divided by `accumulate`."""
        correction = accumulate / micro_batches
        if correction != self._given:
            self._correction.fill_(correction)
            self._given = correction

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate."""
        return loss if self._scaler is None else loss * self._scaler._scale  # type: ignore[operator]

    def __call__(self) -> None:
        self._optimizer.step(self._judged())

    def judge(self) -> None:
        """All but the optimizer's step, see Note [Updates behind the graph]; `step` follows."""
        self._verdict.copy_(self._judged())

    def step(self) -> None:
        """What `judge` leaves to do."""
        with torch.no_grad():
            self._optimizer.step(self._verdict)

    def _judged(self) -> torch.Tensor:
        """Average, unscale and clip; returns 1.0 if the update must be skipped. Every small kernel counts."""
        pairs = self._gradients.present
        gradients = [gradient for _, gradient in pairs]
        if self._average:
            torch._foreach_mul_(gradients, self._correction)
        skip = self._held
        if self._scaler is not None:
            skip = torch.maximum(self._unscale(gradients), self._held)
            self._rescale(skip)
        if self._clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_([p for p, _ in pairs], self._clip_norm, norm)
            assert self.norm is not None
            self.norm.copy_(norm)
            skip = torch.where(norm < math.inf, skip, self._one)
        elif self._scaler is None:
            largest = torch._foreach_norm([g for g in gradients if g.numel()], math.inf)
            worst = torch.stack([norm.float() for norm in largest]).amax()
            skip = torch.where(worst < math.inf, skip, self._one)
        self.skipped.add_(skip)
        return skip

    def _unscale(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Divide by the scale; returns 1.0 if something was not finite."""
        assert self._scaler is not None
        assert self._scaler._scale is not None
        inverse = self._scaler._scale.double().reciprocal().float()
        overflown = torch.zeros_like(self._held)
        for dtype in {gradient.dtype for gradient in gradients}:
            same = [gradient for gradient in gradients if gradient.dtype is dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same, overflown, inverse)
        return overflown

    def _rescale(self, overflown: torch.Tensor) -> None:
        scaler = self._scaler
        assert scaler is not None
        assert scaler._scale is not None
        assert scaler._growth_tracker is not None
        torch._amp_update_scale_(
            scaler._scale,
            scaler._growth_tracker,
            overflown,
            scaler._growth_factor,
            scaler._backoff_factor,
            scaler._growth_interval,
        )
