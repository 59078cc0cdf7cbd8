"""`LLM`: the engine from Python, on the embedded model."""

from __future__ import annotations

import base64
import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from benchmarks.nano import evaluate, mistakes
from lookonce import LLM, SamplingParams, media_hash
from lookonce.config import NANO_FOLDER, MediaConfig, ModelConfig
from lookonce.errors import BadRequestError, ConfigError, ModelNotFoundError, UnavailableError
from lookonce.frontend.frontend import max_prompts_rendered
from lookonce.frontend.tools.calls import content_of, tool_calling
from lookonce.llm import RequestOutput
from lookonce.model.loader import load_model
from lookonce.render.media.pool import MAX_QUEUE_PER_TENANT
from lookonce.render.media.processing import MediaJob, Processing, ProcessingSettings
from lookonce.render.media.resolver import MAX_SIDE_BY_SIDE
from tests.support.drawing import ask, encoded, picture
from tests.support.live_server import until
from tests.support.model.adapters import another, make_adapter
from tests.support.model.cases import ALL_MODELS

GREEDY = SamplingParams(temperature=0, max_tokens=40)
ENDLESS = SamplingParams(ignore_eos=True, max_tokens=3000)
RED_SQUARE = picture(("red", "square"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Two are computed side by side, and the queue asked for is too short for any call."""
    adapters = tmp_path_factory.mktemp("adapters")
    with LLM("nano", max_num_seqs=2, max_queue=1, lora_dir=adapters) as llm:
        yield llm


def test_a_conversation_is_answered_truthfully(llm):
    (output,) = llm.chat(ask(RED_SQUARE, "What is in the picture?"), GREEDY)
    assert output.text == "a red square"
    sample = output.outputs[0]
    assert (sample.index, sample.finish_reason) == (0, "stop")
    assert output.usage.prompt_tokens == len(output.prompt_token_ids)
    assert output.usage.completion_tokens == len(sample.token_ids)
    assert output.usage.prompt_tokens_details.image_tokens == 9


def test_the_embedded_model_is_right_most_of_the_time(llm):
    answered = evaluate(llm, conversations=15, seed=3)
    right = sum(one.right for one in answered)
    assert right / len(answered) > 0.9, mistakes(answered)


def test_an_empty_file_is_said_to_be_empty(llm):
    with pytest.raises(BadRequestError, match="file: the file is empty"):
        llm.transcribe(b"")


def test_many_conversations_are_answered_side_by_side_in_order(llm):
    colours = ["green", "purple", "red"]
    question = "What color is the circle?"
    asked = [ask(picture((colour, "circle")), question) for colour in colours]
    assert [output.text for output in llm.chat(asked, GREEDY)] == colours


def test_the_receipt_says_what_was_looked_up(llm):
    question = ask(picture(("blue", "triangle")), "What is in the picture?")
    cold, warm = (llm.chat(question, GREEDY)[0].reuse_receipt for _ in range(2))
    assert cold.items[0].processor == "miss"
    assert warm.items[0].processor in ("hit", "not_needed")
    assert warm.prefix_cached_tokens > 0
    assert len(cold.items[0].hash) == 16


def test_prompts_are_text_or_tokens_one_or_many(llm):
    prompt = "<|im_start|>user\nSay apple.<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.generate(prompt, GREEDY)
    assert output.text == "apple"
    again = llm.generate([prompt, output.prompt_token_ids], GREEDY)
    assert [o.text for o in again] == ["apple", "apple"]
    assert llm.generate(output.prompt_token_ids, GREEDY)[0].text == "apple"


def test_samples_logprobs_and_stop_strings(llm):
    params = SamplingParams(n=2, temperature=0, logprobs=2, stop=("squ",), max_tokens=40)
    (output,) = llm.chat(ask(RED_SQUARE, "What is in the picture?"), params)
    assert [sample.text for sample in output.outputs] == ["a red ", "a red "]
    assert {sample.stop_reason for sample in output.outputs} == {"squ"}
    for sample in output.outputs:
        assert len(sample.logprobs) == len(sample.token_ids)
        assert all(len(entry.top) == 2 for entry in sample.logprobs)


def test_a_prompt_is_scored_where_words_stand(llm):
    params = SamplingParams(n=2, temperature=0, prompt_logprobs=1, max_tokens=1)
    output, again = llm.chat([ask(RED_SQUARE, "What is it?")] * 2, params)
    scored = output.prompt_logprobs
    assert len(scored) == len(output.prompt_token_ids)
    assert scored[0] is None
    (media,) = output.reuse_receipt.items
    assert scored[media.offset : media.offset + media.length] == [None] * media.length
    assert all(entry.rank >= 1 and len(entry.top) == 1 for entry in scored if entry is not None)
    assert again.prompt_logprobs[1].logprob == pytest.approx(scored[1].logprob, abs=1e-4)
    assert llm.chat(ask("Say river."), GREEDY)[0].prompt_logprobs is None


def test_without_parameters_the_model_s_own_are_used(llm):
    assert llm.chat(ask("Say river."))[0].text == "river"


def test_text_streams_and_a_stream_may_be_left(llm):
    question = ask(RED_SQUARE, "What is in the picture?")
    assert "".join(llm.stream_chat(question)) == "a red square"
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2000)
    stream = llm.stream_chat(question, long)
    next(stream)
    stream.close()
    assert llm.chat(question, GREEDY)[0].text == "a red square"
    assert llm.stats()["num_requests_running"] == 0


def num_kept(size: int) -> int:
    """The number of bytes objects of exactly this length that are still referenced."""
    gc.collect()
    tracked = gc.get_objects()
    inside = gc.get_referents(*tracked)
    inside += gc.get_referents(*(one for one in inside if not gc.is_tracked(one)))
    return len({id(one) for one in inside if type(one) is bytes and len(one) == size})


def test_while_an_answer_is_made_only_the_engine_holds_its_picture(llm):
    pixels = np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)
    media = [encoded(Image.fromarray(pixels))]
    size = len(media[0])
    assert num_kept(size) == 1
    url = "data:image/png;base64," + base64.b64encode(media.pop()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    stream = llm.stream_chat([{"role": "user", "content": [part]}], ENDLESS)
    next(stream)
    assert num_kept(size) == 0
    stream.close()


def test_a_stream_gives_the_whole_answer_when_it_has_ended(llm):
    ended: list[RequestOutput] = []
    texts = list(llm.stream_chat(ask("Say river."), GREEDY, on_finish=ended.append))
    assert [output.text for output in ended] == ["".join(texts)] == ["river"]
    assert ended[0].reuse_receipt.prompt_tokens == len(ended[0].prompt_token_ids)


def test_ctrl_c_ends_a_stream_and_nothing_else(llm, monkeypatch):
    steps = itertools.count()

    async def interrupted(texts):
        if next(steps) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return await anext(texts, None)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # noqa: PT012
            patch.setattr("lookonce.llm._next", interrupted)
            for _ in llm.stream_chat(ask("Say river."), ENDLESS):
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.chat(ask("Say river."), GREEDY)[0].text == "river"
    assert llm.stats()["num_requests_running"] == 0


def test_one_bad_request_fails_its_call_alone(llm):
    with pytest.raises(BadRequestError, match="context"):
        llm.generate(["fine", "x " * 9000], GREEDY)
    assert llm.chat(ask("Say river."), GREEDY)[0].text == "river"


def test_a_pillow_picture_is_a_part_of_a_message(llm):
    """Written as PNG, so the same pixels are the same picture, however often they are drawn."""

    def asked(picture):
        part = {"type": "image_pil", "image_pil": picture}
        text = {"type": "text", "text": "What is in the picture?"}
        return llm.chat([{"role": "user", "content": [part, text]}], GREEDY)[0]

    first, again = asked(RED_SQUARE), asked(RED_SQUARE.copy())
    (encoded,) = llm.chat(ask(RED_SQUARE, "What is in the picture?"), GREEDY)
    assert first.text == again.text == encoded.text
    assert again.reuse_receipt.items[0].hash == first.reuse_receipt.items[0].hash
    assert again.reuse_receipt.items[0].processor == "hit"
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].image_pil"):
        asked("red.png")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mm_processor_cache_gb": "abc"}, "mm_processor_cache_gb must be a number, got 'abc'"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be a whole number"),
        ({"dtype": 3}, "dtype must be a text"),
        ({"limit_mm_per_prompt": {"smell": 1}}, "limit-mm-per-prompt"),
    ],
)
def test_a_wrong_option_is_named_before_anything_loads(options, told):
    with pytest.raises(ConfigError, match=told):
        LLM("nano", **options)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        (None, "prompts: a prompt is a text"),
        ({"prompt": "Hi", "multi_modal_data": {}}, "prompts: .* pictures and sound go into"),
        (["Hi", {"prompt": "Hi"}], r"prompts\[1\]"),
        ([True], r"prompts\[0\]"),
        ([[5], [1.5]], r"prompts\[1\]"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(llm, prompts, told):
    with pytest.raises(BadRequestError, match=told):
        llm.generate(prompts, GREEDY)


def test_what_is_no_conversation_or_no_parameters_is_refused(llm):
    for messages in ("Hello", None, {"role": "user", "content": "Hello"}):
        with pytest.raises(BadRequestError, match="messages must be a list"):
            llm.chat(messages, GREEDY)
    with pytest.raises(BadRequestError, match="must be a SamplingParams"):
        llm.generate("Hello", {"max_tokens": 3})


def test_more_prompts_than_may_wait_are_all_answered_in_order(llm):
    words = ["apple", "river"] * 50
    prompts = [f"<|im_start|>user\nSay {w}.<|im_end|>\n<|im_start|>assistant\n" for w in words]
    assert [output.text for output in llm.generate(prompts, GREEDY)] == words


def test_more_new_pictures_than_may_wait_for_a_worker_are_all_answered(llm):
    asked = [ask(Image.new("RGB", (28, 28), (n % 256, n // 256, 7)), "Look.") for n in range(300)]
    outputs = llm.chat(asked, SamplingParams(max_tokens=1))
    assert [output.reuse_receipt.items[0].processor for output in outputs] == ["miss"] * 300
    assert len({output.reuse_receipt.items[0].hash for output in outputs}) == 300


def test_the_first_failure_ends_all_prompts_also_those_not_begun(llm):
    with pytest.raises(BadRequestError, match="context"):
        llm.generate(["Once", "x " * 9000, *["Once"] * 100], ENDLESS)
    until(lambda: _busy(llm) == 0, 60, lambda: str(llm.stats()))


def _busy(llm: LLM) -> float:
    stats = llm.stats()
    return stats["num_requests_running"] + stats["num_requests_waiting"]


def test_a_session_answers_what_the_whole_conversation_would_be_answered(llm):
    """Although each turn is rendered and computed alone."""
    turns = [
        ask(RED_SQUARE, "What is in the picture?"),
        [{"role": "user", "content": "What color is the square?"}],
        ask(picture(("blue", "circle")), "What is in the second picture?"),
    ]
    conversation, expected = [], []
    for turn in turns:
        conversation += turn
        expected.append(llm.chat(conversation, GREEDY)[0].text)
        conversation.append({"role": "assistant", "content": expected[-1]})
    with llm.session(turns[0], GREEDY) as session:
        answers = [session.answer()]
        for turn in turns[1:]:
            session.append(turn)
            answers.append(session.answer())
    assert answers == expected


def test_what_a_session_is_told_without_a_question_is_known_to_later_answers(llm):
    with llm.session(ask(RED_SQUARE, "Look."), GREEDY, answer=False) as session:
        session.append([{"role": "user", "content": "What is in the picture?"}])
        pieces = []
        for piece in session:
            pieces.append(piece)
            if piece.ended:
                break
        assert "".join(piece.text for piece in pieces) == "a red square"
        assert {piece.extension for piece in pieces} == {1}
        assert pieces[-1].ended == "stop"


def test_a_session_of_plain_tokens_is_interrupted_and_compacted(llm):
    forever = SamplingParams(temperature=0, ignore_eos=True)
    with llm.session(prompt="one two", sampling_params=forever, overflow="compact") as session:
        number = session.append(prompt=" three", interrupt=True, max_tokens=4)
        ends = []
        for piece in session:
            if piece.ended:
                ends.append((piece.extension, piece.ended))
            if piece.extension == number and piece.ended == "length":
                break
        assert ends[-1] == (1, "length")
        assert set(ends[:-1]) <= {(0, "interrupted")}
    with llm.session(prompt=[7] * 4000, sampling_params=GREEDY, overflow="compact") as session:
        session.answer()
        session.append(prompt=[8] * 300)
        said = []
        for piece in session:
            said.append(piece.compacted)
            if piece.ended:
                break
        assert sum(said) > 1000


def test_a_session_is_refused_what_it_cannot_do(llm):
    with pytest.raises(BadRequestError, match="stop_token_ids"):
        llm.session(prompt="x", sampling_params=SamplingParams(stop=("y",)))
    with pytest.raises(BadRequestError, match="messages or with a prompt"):
        llm.session()
    with llm.session(prompt="x", sampling_params=GREEDY, answer=False) as session:
        with pytest.raises(BadRequestError, match="plain prompt"):
            session.append([{"role": "user", "content": "Hello"}])
        session.append(prompt="y")
        session.answer()
    with pytest.raises(BadRequestError, match="the session is closed"):
        session.append(prompt="z")
    until(lambda: llm.stats()["sessions_open"] == 0, 60, lambda: "a session is open")


def test_calls_name_adapters_and_a_session_keeps_its_own(llm, tmp_path):
    model = load_model(ModelConfig(folder=str(NANO_FOLDER), served_name="nano"))
    one = make_adapter(NANO_FOLDER, model, tmp_path / "one", target_modules="all-linear")
    two = another(one, tmp_path / "two")
    question = ask(RED_SQUARE, "What is in the picture?")

    def answers(**options):
        (chat,) = llm.chat(question, GREEDY, **options)
        (text,) = llm.generate("Tell me", GREEDY, **options)
        return chat.text, text.text

    llm.load_lora("a", one)
    plain, with_one = answers(), answers(lora="a")
    assert plain[0] == "a red square"
    assert plain != with_one
    assert "".join(llm.stream_chat(question, GREEDY, lora="a")) == with_one[0]
    with llm.session(question, GREEDY, lora="a") as session:
        assert session.answer() == with_one[0]
        llm.unload_lora("a")
        llm.load_lora("a", two)
        session.append(question)
        second = session.answer()
    assert answers(lora="a") not in (plain, with_one)
    with pytest.raises(BadRequestError, match="its folder has no adapter_config"):
        llm.load_lora("b", tmp_path)
    with pytest.raises(ModelNotFoundError, match="'b'"):
        llm.chat(question, lora="b")
    llm.load_lora("a", one, replace=True)
    assert llm.loras == ["a"]
    with llm.session(question, GREEDY, lora="a") as session:
        assert session.answer() == with_one[0]
        session.append(question)
        assert session.answer() == second
    llm.unload_lora("a")


def test_wrong_options_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--dtype"):
        LLM("nano", dtype="float7")


SCRIPT = """
import os, sys
from lookonce import LLM, SamplingParams
from lookonce.errors import UnavailableError

llm = LLM("nano")

def ask():
    try:
        return llm.generate("Hello", SamplingParams(max_tokens=1))[0].usage.completion_tokens
    except UnavailableError as error:
        return error.message

if (child := os.fork()) == 0:
    print(ask(), flush=True)
    sys.exit()  # with all that Python does at exit
print("child:", os.waitpid(child, 0)[1])
print(ask())
"""


def test_a_script_needs_no_main_guard_may_fork_and_may_forget_to_close(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == [
        "this LLM is of the process that this one was forked from",
        "child: 0",
        "1",
    ], done.stderr
    assert "Traceback" not in done.stderr
    assert "parent process is gone" not in done.stderr


def test_the_package_exports_are_lazy():
    code = "import lookonce, sys; print('torch' in sys.modules or 'zmq' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
    assert len(media_hash(encoded(RED_SQUARE), modality="image")) == 32


@pytest.mark.parametrize("limit", [1, 10, 1000])
def test_prompts_rendered_side_by_side_leave_room_for_items_that_are_asked_for_again(limit):
    """All of an `LLM` is one tenant to the media pool."""
    media = MediaConfig(limit_per_prompt={"image": limit})
    at_a_time = max_prompts_rendered(media) * min(limit, MAX_SIDE_BY_SIDE)
    assert 0 < 2 * at_a_time <= MAX_QUEUE_PER_TENANT


def test_an_injected_picture_is_neither_decoded_nor_processed(llm, nano_folder):
    purple = picture(("purple", "triangle"))
    data = encoded(purple)
    settings = ProcessingSettings(str(nano_folder), "float32", 1 << 20, 60.0)
    item = Processing(settings).run(MediaJob("image", data)).item
    dtypes = {"float32": "<f4", "int64": "<i8"}
    arrays = {
        name: np.frombuffer(array.data, dtypes[array.dtype]).reshape(array.shape)
        for name, array in item.arrays.items()
    }
    name = llm.media_hash(data, modality="image")
    for status in ("stored", "already_held"):
        outcomes = llm.inject_into_mm_cache({"image": [name]}, {"image": [arrays]})
        assert [outcome.status for outcome in outcomes["image"]] == [status]
    (output,) = llm.chat(ask(purple, "What is in the picture?"), GREEDY)
    assert output.text == "a purple triangle"
    assert output.reuse_receipt.items[0].processor == "injected"


def test_hashes_and_items_that_do_not_match_are_refused(llm):
    with pytest.raises(BadRequestError):
        llm.inject_into_mm_cache({"image": ["a", "b"]}, {"image": [{}]})
    with pytest.raises(BadRequestError, match="'picture' is not one of image, audio, video"):
        llm.inject_into_mm_cache({"picture": ["a"]}, {"picture": [{}]})
    with pytest.raises(BadRequestError, match=r"mm_hashes\.image: a list of texts"):
        llm.inject_into_mm_cache({"image": [b"a"]}, {"image": [{}]})
    with pytest.raises(BadRequestError, match="bytes of encoded media"):
        llm.media_hash(RED_SQUARE, modality="image")
    with pytest.raises(BadRequestError, match="one of image, audio, video"):
        llm.media_hash(b"", modality="picture")
    for item in ({"pixels": [1, 2]}, np.zeros(3, np.float32)):
        outcomes = llm.inject_into_mm_cache({"image": ["a"]}, {"image": [item]})
        assert outcomes["image"][0].status == "rejected"


@pytest.mark.skipif(not ALL_MODELS, reason="in `make test-models`")
def test_a_chat_says_what_its_final_channel_says(folder):
    """A random model that likes markers: what is read is compared with its tokens."""
    with LLM(str(folder("gpt_oss")), max_model_len=512) as llm:
        renderer = llm._frontend.renderer
        names = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
        liked = {renderer.special_tokens[name]: 6.0 for name in names}
        params = SamplingParams(temperature=2.0, seed=5, logit_bias=liked, max_tokens=120)
        (output,) = llm.chat(ask("Hello"), params)
        speech = tool_calling(None, llm._frontend.tool_dialect)
        special = renderer.special_tokens.items()
        skipped = {token_id for text, token_id in special if text not in speech.markers}
        said = output.outputs[0].token_ids
        raw = renderer.decode([token_id for token_id in said if token_id not in skipped])
        assert "<|message|>" in raw
        assert output.text == content_of(speech.reader().push(raw, last=True))
        assert not any(name in output.text for name in names)
        assert "".join(llm.stream_chat(ask("Hello"), params)) == output.text
        (whole,) = llm.generate(output.prompt_token_ids, params)
        assert whole.outputs[0].token_ids[:20] == output.outputs[0].token_ids[:20]
        assert whole.text != output.text


def test_many_prompts_take_every_place_in_the_batch(llm):
    """The last test of `llm`, which is closed: all answers would take a minute."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, ["Once"] * 6, ENDLESS)
        until(lambda: call.done() or llm.stats()["num_requests_running"] == 2, 60, str)
        assert not call.done(), call.exception()
        session = llm.session(prompt="Once", answer=False)
        llm.close()
        with pytest.raises(UnavailableError):
            call.result()
    with pytest.raises(UnavailableError, match="this LLM is closed"):
        llm.generate("Once", GREEDY)
    session.close()
    llm.close()


@pytest.mark.parametrize("lora", [{"a": "/nowhere"}, ["a=/nowhere"], "a=/nowhere"])
def test_adapters_are_a_mapping_or_texts(lora):
    with pytest.raises(ConfigError, match="--lora: /nowhere is not a folder"):
        LLM("nano", lora=lora)
