"""What a rendered prompt refers to: exact tokens, and the same names for the same beginnings."""

from __future__ import annotations

from lookonce.cache.identity import item_key, scope_digest
from lookonce.fleet.identity import Identity, Processor
from lookonce.fleet.index import short
from lookonce.fleet.router import Router
from lookonce.fleet.token_identity import identify_prompt
from lookonce.types.lora import LoRAIdentity, adapted_item_key
from lookonce.types.media import Expansion, MediaFeature
from lookonce.types.request import RenderedItem, RenderedPrompt

ADAPTED = Processor(
    model="nano",
    adapters={
        "texts": LoRAIdentity(b"1" * 32),
        "seeing": LoRAIdentity(b"2" * 32, b"3" * 32),
    },
)


def prompt(
    ids: list[int], *media: tuple[int, int, bytes], tenant: str = "", salt: str | None = None
) -> RenderedPrompt:
    """`media`: (offset, length, digest)."""
    scope = scope_digest(tenant, salt)
    features, items = [], []
    for offset, length, digest in media:
        key = item_key(scope, digest)
        features.append(MediaFeature(key, "image", offset, length, length))
        expansion = Expansion(((1, length),), 1)
        items.append(RenderedItem(key, digest, "image", expansion, None, encoded=b"file"))
    return RenderedPrompt(ids, tuple(features), items, scope, tenant=tenant)


def identity(given: RenderedPrompt, model: str = "nano") -> Identity:
    return identify_prompt(given, ADAPTED, model=model)


def common(one: Identity, other: Identity) -> int:
    """Tokens of the pieces that both begin with."""
    tokens = 0
    for a, b in zip(one.pieces, other.pieces, strict=False):
        if a.digest != b.digest:
            break
        tokens += a.num_tokens or 0
    return tokens


def test_pieces_have_all_tokens_and_media_are_pieces_of_their_own() -> None:
    for length in (0, 1, 31, 32, 1023, 1025, 9000, 20_000):
        pieces = identity(prompt(list(range(length)))).pieces
        assert sum(piece.num_tokens or 0 for piece in pieces) == length
    found = identity(prompt([0] * 100, (10, 20, b"a" * 32), (30, 8, b"b" * 32)))
    placed = [
        (piece.medium, piece.num_tokens) for piece in found.pieces if piece.medium is not None
    ]
    assert placed == [(0, 20), (1, 8)]
    assert sum(piece.num_tokens or 0 for piece in found.pieces) == 100
    assert [medium.key for medium in found.media] == [
        short(item_key(scope_digest("", None), digest * 32)) for digest in (b"a", b"b")
    ]


def test_prompts_that_begin_alike_share_their_pieces_up_to_a_few_tokens() -> None:
    ids = [number % 997 for number in range(20_000)]
    for same, most in ((100, 32), (1000, 32), (5000, 128), (15_000, 512)):
        found = common(identity(prompt(ids)), identity(prompt([*ids[:same], 998, 998])))
        assert same - most < found <= same
    grown = common(identity(prompt(ids[:700])), identity(prompt(ids[:900])))
    assert 700 - 32 < grown <= 700


def test_another_medium_tenant_salt_or_adapter_is_another_beginning() -> None:
    plain = prompt([5] * 64, (0, 16, b"a" * 32))
    for other in (
        identity(prompt([5] * 64, (0, 16, b"b" * 32))),
        identity(prompt([5] * 64, (0, 16, b"a" * 32), tenant="other")),
        identity(prompt([5] * 64, (0, 16, b"a" * 32), salt="salt")),
        identity(plain, "texts"),
    ):
        assert common(identity(plain), other) == 0


def test_an_adapter_that_changes_the_encoder_has_outputs_of_its_own() -> None:
    plain = prompt([5] * 64, (0, 16, b"a" * 32))
    (medium,) = identity(plain, "seeing").media
    assert medium.output == short(adapted_item_key(b"3" * 32, plain.items[0].key))
    assert identity(plain, "texts").media[0].output is None


def test_a_router_counts_them_exactly() -> None:
    router = Router()
    for name in "ab":
        router.add_engine(name, "nano", follows=False)
    ids = list(range(500))
    first = router.route("1", identity(prompt(ids)))
    router.ended("1", first)
    again = router.route("2", identity(prompt([*ids, *ids])))
    assert again.engine is first.engine
    assert (again.work.known_tokens, again.work.num_tokens) == (480, 1000)
    router.ended("2", again)
    router.check_integrity()
