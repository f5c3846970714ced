"""Check of what a run needs of a checkpoint, before anything of the run is changed.

The digests of a checkpoint say that its files are those that were written, and whoever can write files can write
digests. So every tensor is compared with the model, and states are only accepted that a run can leave.
"""

from torch import Tensor, nn

from birdie.errors import WeightsError
from birdie.train import average
from birdie.train.bandit import Bandit, BanditSettings
from birdie.train.checkpoint import Checkpoint, require_rng_state
from birdie.train.optimizers import require_state, split_parameters
from birdie.train.settings import AverageSettings, OptimizerSettings


def require_resumable(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: OptimizerSettings,
    averaging: AverageSettings,
    bandit: BanditSettings,
) -> None:
    """Check that a run can resume from `checkpoint`; the position of the loader is left to the caller.

    Args:
        checkpoint: read from a file.
        model: of the run, with any weights.
        optimizer, averaging, bandit: settings of the run; what has changed since the checkpoint begins anew.
    """
    _require_weights(checkpoint.weights, dict(model.named_parameters()), dict(model.named_buffers()))
    square = checkpoint.settings.get("muon_beta2", optimizer.muon_beta2)
    strict = checkpoint.format > 2
    groups = split_parameters(model)
    require_state(groups, checkpoint.optimizer, checkpoint.step, row_square=bool(square), every=strict)
    require_rng_state(checkpoint.rng)
    if checkpoint.average:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        average.require_state(checkpoint.average, tensors, checkpoint.step)
    elif averaging.kind != "none" and checkpoint.settings.get("average.kind") == averaging.kind:
        raise WeightsError(f"its {averaging.kind.upper()} of the weights is missing")
    if bandit.every:
        if not checkpoint.bandit and checkpoint.settings.get("bandit.every"):
            raise WeightsError("the state of its learning-rate bandit is missing")
        Bandit(bandit, 0).load_state(checkpoint.bandit)


def _require_weights(saved: dict[str, Tensor], parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
    tensors = {**parameters, **buffers}
    if different := sorted(tensors.keys() ^ saved.keys()):
        raise WeightsError(
            f"model and checkpoint differ in tensor {different[0]!r}; resume with the model that was saved"
        )
    for name, tensor in tensors.items():
        weight = saved[name]
        if weight.shape != tensor.shape or weight.dtype != tensor.dtype:
            raise WeightsError(
                f"tensor {name!r} is {weight.dtype} of shape {tuple(weight.shape)} in the checkpoint and "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in the model; resume with the model that was saved"
            )
        if name in parameters and not bool(weight.isfinite().all()):
            raise WeightsError(f"tensor {name!r} of the checkpoint has values that are not finite")
