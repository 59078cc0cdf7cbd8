"""What things take: the seconds that stand in for the model, its machine and the API process.

`lookonce bench prices` measures them and writes them as JSON. A step takes

    step
    + each sequence that decodes:   decode_row + decode_context x tokens before it
    + each chunk of a prompt:       prompt_row + prompt_token x tokens + prompt_pair x pairs
                                    + embed_item x media items whose encoder outputs it takes
      with over `short_prompt` tokens, instead: long_prompt_row, long_prompt_token
    + where the encoder runs:       encode_step + encode_item x items + encode_token x tokens

A pair is a token of the chunk and one that it attends to.

No two requests take the same, even of one kind on an idle server. `spread` tells how unequal they
are, and `spread_of` gives each request its share of that. `idle` tells how much longer a request
takes that comes after a pause of the server, when cores sleep and caches have lost what it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ConfigError
from lookonce.types.step import StepPlan

NANO_PRICES = Path(__file__).with_name("nano.json")
"""Measured on the machine that the file names."""
_GOLDEN, _ROOT = 0x9E3779B97F4A7C15, 0x6A09E667F3BCC908
"""The fractions of the golden ratio and of the square root of two, of 2**64."""
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class TierPrices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one kind of tier: seconds of an operation, and of each byte."""

    operation: float = 1e-4
    byte: float = 2e-10


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, and the sizes that caches are counted in."""

    measured_on: str = ""
    # A step.
    step: float = 1e-3
    decode_row: float = 1e-4
    decode_context: float = 0.0
    prompt_row: float = 0.0
    prompt_token: float = 1e-4
    prompt_pair: float = 0.0
    short_prompt: int = 0
    """Tokens of a chunk that is computed as decodes are; longer ones have prices of their own. 0:
    all have one price."""
    long_prompt_row: float = 0.0
    long_prompt_token: float = 0.0
    embed_item: float = 0.0
    """Of each media item of which a chunk has rows of the encoder's output: their copying into the
    chunk, and computing it in another way. A chunk after the item's blocks, cached, has none."""
    encode_step: float = 0.0
    encode_item: float = 5e-3
    encode_token: float = 0.0
    # The API process and its media workers.
    request: float = 2e-3
    """From the request's last byte to the engine, without media, of the API process's time."""
    request_token: float = 0.0
    """Of each token of the prompt: tokenizing."""
    request_item: float = 0.0
    """Of each media item: finding it, and telling the engine of it."""
    request_byte: float = 0.0
    """Of each byte of encoded media: base64 and digest."""
    first_token: float = 1e-3
    """From the end of a step to the client."""
    stream_token: float = 3e-5
    """Of the API process's time, for each token that it streams."""
    end: float = 0.0
    """Of the API process's time, when an answer ends."""
    process_item: float = 5e-3
    """A media worker's time for an item that is not known."""
    process_pixel: float = 0.0
    process_token: float = 0.0
    media_workers: int = 2
    cores: float = 0.0
    """That the engine, the API process and the media workers of a server share, as the work that
    all do together over that of one alone; 0: each has one of its own."""
    prompt_threads: float = 1.0
    encode_threads: float = 1.0
    """Cores that computing a prompt, and encoding, keep busy; all else of a step takes one."""
    route: float = 0.0
    """In a fleet: from the front-end to the engine's server."""
    spread: tuple[float, ...] = (1.0,)
    """Evenly spaced quantiles of the seconds to the first token over the median of requests of the
    same kind, ascending; no unit."""
    idle: tuple[tuple[float, float], ...] = ()
    """Points (seconds, seconds more): how much longer the first token takes of a request that comes
    so long after all before it have had theirs, than of one that comes at once. Answers that are
    streamed meanwhile change nothing. Both ascend; between two points a straight line, beyond the
    last point as at it. None: no longer."""
    # External tiers.
    host: TierPrices = TierPrices()
    disk: TierPrices = TierPrices(operation=5e-4, byte=1e-9)
    valkey: TierPrices = TierPrices(operation=1e-3, byte=1e-9)
    # Sizes.
    kv_token_bytes: int = 1024
    encoder_row_bytes: int = 1024
    item_token_bytes: int = 4096
    """Of a processed media item, for each of its tokens."""
    block_size: int = 16
    max_model_len: int = 1 << 20

    def of_step(self, plan: StepPlan) -> float:
        """Seconds of a step, encoder runs included."""
        return sum(self._parts_of(plan))

    def threads_of(self, plan: StepPlan) -> float:
        """Cores that a step keeps busy, on average over its time."""
        decoding, prompts, encoding = self._parts_of(plan)
        busy = decoding + self.prompt_threads * prompts + self.encode_threads * encoding
        seconds = decoding + prompts + encoding
        return busy / seconds if seconds else 1.0

    def _parts_of(self, plan: StepPlan) -> tuple[float, float, float]:
        """Seconds of a step: decodes and what each step takes, prompts, encoder runs."""
        decoding, prompts, encoding = self.step, 0.0, 0.0
        for entry in plan.scheduled:
            count = entry.num_tokens
            if count == 1 and entry.sample:
                decoding += self.decode_row + self.decode_context * (entry.start + 1)
            else:
                pairs = count * (entry.start + (count + 1) / 2)
                prompts += self.prompt_pair * pairs + self.embed_item * len(entry.embeds)
                if self.short_prompt and count > self.short_prompt:
                    prompts += self.long_prompt_row + self.long_prompt_token * count
                else:
                    prompts += self.prompt_row + self.prompt_token * count
        if plan.encode:
            encoding = self.encode_step + sum(
                self.of_encoding(e.item.expansion.num_embeds) for e in plan.encode
            )
        return decoding, prompts, encoding

    def of_encoding(self, num_tokens: int) -> float:
        """Seconds of one item in an encoder run, without `encode_step`."""
        return self.encode_item + self.encode_token * num_tokens

    def of_decodes(self, num_rows: int, context: int, num_steps: int) -> float:
        """Seconds of steps in a row that only decode. `context`: tokens that the rows have, each
        with the one that it computes, in the first of them."""
        each = self.step + self.decode_row * num_rows + self.decode_context * context
        grown = self.decode_context * num_rows * (num_steps - 1) / 2
        return num_steps * (each + grown)

    def spread_of(self, number: int, engine: int = 0) -> float:
        """How many times the price a request takes until its first token: in the API process, in
        media workers, in steps that compute its prompt. It is the request with this number of all
        of its kind that have come to the engine.

        Numbers step through `spread` by the golden ratio, so that it is the same in each run, and
        any requests of a kind that follow one another have nearly the whole distribution. Engines
        begin at different places of it.
        """
        part = (number + 1) * _GOLDEN + engine * _ROOT & _MASK
        return self.spread[part * len(self.spread) >> 64]

    def of_idle(self, seconds: float) -> float:
        """How much longer a request takes, in seconds, that comes when no request has waited for
        its first token for so many `seconds`."""
        if not self.idle:
            return 0.0
        at = bisect_right(self.idle, seconds, key=lambda point: point[0])
        if not 0 < at < len(self.idle):
            return self.idle[max(0, at - 1)][1]
        (before, least), (after, most) = self.idle[at - 1 : at + 1]
        return least + (most - least) * (seconds - before) / (after - before)

    def of_processing(self, pixels: int, num_tokens: int) -> float:
        return self.process_item + self.process_pixel * pixels + self.process_token * num_tokens

    def of_request(self, num_tokens: int, num_items: int, media_bytes: int) -> float:
        media = self.request_item * num_items + self.request_byte * media_bytes
        return self.request + self.request_token * num_tokens + media


# --- measuring ----------------------------------------------------------------------------------

STEP_PRICES = (
    "step",
    "decode_row",
    "decode_context",
    "prompt_row",
    "prompt_token",
    "prompt_pair",
    "long_prompt_row",
    "long_prompt_token",
    "encode_step",
    "encode_item",
)
"""What `of_step` multiplies with amounts."""


def amounts_of(plan: StepPlan, short_prompt: int) -> tuple[float, ...]:
    """What `Prices.of_step` multiplies prices with, in the order of `STEP_PRICES`."""
    names = msgspec.structs.asdict(Prices())
    nothing = msgspec.structs.replace(
        Prices(short_prompt=short_prompt),
        **{name: 0.0 for name in names if isinstance(names[name], float)},
    )
    return tuple(
        msgspec.structs.replace(nothing, **{name: 1.0}).of_step(plan) for name in STEP_PRICES
    )


def fit(amounts: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Prices, none below 0, with the least sum of squared relative errors. Prices that would be
    negative are 0, the most negative first."""
    rows = amounts / seconds[:, None]
    prices = np.zeros(amounts.shape[1])
    used = [n for n in range(amounts.shape[1]) if amounts[:, n].any()]
    while used:
        found, *_ = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)
        if found.min() >= 0:
            prices[used] = found
            break
        used.pop(int(found.argmin()))
    return prices


def read_prices(path: Path) -> Prices:
    """Raises `ConfigError` naming the field at fault."""
    try:
        prices = msgspec.json.decode(path.read_bytes(), type=Prices)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no price list: {error}") from None
    for name, value in msgspec.structs.asdict(prices).items():
        if isinstance(value, (int, float)) and not 0 <= value < 1e12:
            raise ConfigError(f"{path}: {name} is {value}")
    if not prices.spread or not all(0 < each < 1e6 for each in prices.spread):
        raise ConfigError(f"{path}: spread has numbers above 0, at least one")
    _check_idle(prices, path)
    if prices.step + prices.decode_row <= 0 or prices.block_size < 1 or prices.media_workers < 1:
        raise ConfigError(f"{path}: a step takes time, and there is a block size and a worker")
    return prices


def _check_idle(prices: Prices, path: Path) -> None:
    points = prices.idle
    if not all(0 <= number < 1e6 for point in points for number in point):
        raise ConfigError(f"{path}: idle has seconds from 0 on")
    if any(one[0] >= other[0] or one[1] > other[1] for one, other in pairwise(points)):
        raise ConfigError(f"{path}: idle has points whose seconds ascend")
