multiplies_bf16: int
"""Whether `attend_windows` takes bf16."""

def make(
    model: tuple[float, ...],
    layers: tuple[tuple[float, ...], ...],
    half: bool,
    half_weights: bool,
    /,
) -> object: ...
def run(decoder: object, *step: int) -> int: ...
def attend_windows(*numbers: float) -> None: ...
