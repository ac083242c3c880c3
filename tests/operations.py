"""How much work something is, in operations of torch."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperationCount(TorchDispatchMode):
    """Counts the operations made while it is on, in ``count``."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))
