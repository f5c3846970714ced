"""Training of what is stored: weights that are small when they are coded, for any module."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.small.qat.fake_quantization import FakeQuantization as FakeQuantization
    from birdie.small.qat.fake_quantization import storage_rules as storage_rules
    from birdie.small.qat.settings import Qat as Qat
    from birdie.small.stored_training import BudgetFile as BudgetFile
    from birdie.small.stored_training import StoredTraining as StoredTraining
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
