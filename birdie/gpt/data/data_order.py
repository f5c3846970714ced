"""Names of the orders in which training reads its shards; `sampler` has the orders."""

from typing import Literal, get_args

Order = Literal["sequential", "shuffled", "coprime", "packed"]


def unknown_order(order: str) -> str:
    """Return the error message for an order that does not exist."""
    *names, last = get_args(Order)
    return f"data order {order!r} is unknown; choose {', '.join(names)} or {last}"
