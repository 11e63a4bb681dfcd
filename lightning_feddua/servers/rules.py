"""The named server rules: each fixes the three choices of :class:`FedDuAServer`."""

from typing import Literal

from lightning_feddua.servers.feddua import FedDuAServer


class FedAvg(FedDuAServer):
    """``w += η_g Δ̄`` (McMahan et al., 2017).

    Args:
        eta_g: the global learning rate.
    """

    def __init__(self, eta_g: float = 1.0) -> None:
        super().__init__("identity", step_size=eta_g)


class FedAvgM(FedDuAServer):
    """FedAvg with a heavy ball: ``u = β₁ u + Δ̄``, ``w += η_g u`` (Hsu et al., 2019).

    Args:
        eta_g: the global learning rate.
        beta1: the momentum.
    """

    def __init__(self, eta_g: float = 1.0, beta1: float = 0.9) -> None:
        super().__init__("identity", step_size=eta_g, beta1=beta1, heavy_ball=True)


class FedExP(FedDuAServer):
    """FedAvg with the extrapolated step ``η = m / (‖Δ̄‖² + ε_g)`` (Jhunjhunwala et al., 2023).

    Args:
        eps_g: added to the denominator of the step.
        min_step: lower bound of the step; 1.0 is the original paper's.
    """

    def __init__(self, eps_g: float = 0.0, min_step: float | None = None) -> None:
        super().__init__("identity", eps_g=eps_g, min_step=min_step)


class FedExPM(FedDuAServer):
    """FedExP on the momentum of the mean update.

    Args:
        eps_g: added to the denominator of the step.
        beta1: the momentum.
        min_step: lower bound of the step.
    """

    def __init__(self, eps_g: float = 0.0, beta1: float = 0.9, min_step: float | None = None) -> None:
        super().__init__("identity", beta1=beta1, eps_g=eps_g, min_step=min_step)


class FedAdagrad(FedDuAServer):
    """Adagrad on the mean update, with a constant step (Reddi et al., 2021).

    Args:
        eta_g: the global learning rate.
        eps: added to √s.
        initial_accumulator: the value of s before the first round.
    """

    def __init__(self, eta_g: float = 0.01, eps: float = 1e-9, initial_accumulator: float = 0.0) -> None:
        super().__init__("adagrad", step_size=eta_g, eps=eps, initial_accumulator=initial_accumulator)


class FedAdam(FedDuAServer):
    """Adam on the mean update, with a constant step (Reddi et al., 2021).

    Args:
        eta_g: the global learning rate.
        beta1: the momentum.
        beta2: memory of the accumulator.
        eps: added to √s.
        bias_correction: correct v and s for their start at zero; the federated papers do not.
        initial_accumulator: the value of s before the first round.
    """

    _accumulator: Literal["adam", "yogi"] = "adam"

    def __init__(
        self,
        eta_g: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-9,
        bias_correction: bool = False,
        initial_accumulator: float = 0.0,
    ) -> None:
        super().__init__(
            self._accumulator,
            step_size=eta_g,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            bias_correction=bias_correction,
            initial_accumulator=initial_accumulator,
        )


class FedYogi(FedAdam):
    """FedAdam with Yogi's accumulator, which forgets large updates more slowly (Reddi et al., 2021)."""

    _accumulator = "yogi"


class FedDuAdagrad(FedDuAServer):
    """FedDuA with Adagrad: a preconditioned mean update and a step set from the data. Nothing to tune on the server.

    Args:
        eps: added to √s.
        eps_g: added to the denominator of the step.
        initial_accumulator: the value of s before the first round.
    """

    def __init__(self, eps: float = 1e-9, eps_g: float = 0.0, initial_accumulator: float = 0.0) -> None:
        super().__init__("adagrad", eps=eps, eps_g=eps_g, initial_accumulator=initial_accumulator)


class FedDuAdam(FedDuAServer):
    """FedDuA with Adam: momentum, a preconditioner that forgets, and a step set from the data.

    Args:
        beta1: the momentum.
        beta2: memory of the accumulator.
        eps: added to √s.
        eps_g: added to the denominator of the step.
        initial_accumulator: the value of s before the first round.
    """

    _accumulator: Literal["adam", "yogi"] = "adam"

    def __init__(
        self,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-9,
        eps_g: float = 0.0,
        initial_accumulator: float = 0.0,
    ) -> None:
        super().__init__(
            self._accumulator,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            eps_g=eps_g,
            initial_accumulator=initial_accumulator,
        )


class FedDuYogi(FedDuAdam):
    """FedDuAdam with Yogi's accumulator; not in the paper, but in its framework."""

    _accumulator = "yogi"
