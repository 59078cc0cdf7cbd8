"""Several API processes, one `/metrics`."""

from __future__ import annotations

import asyncio

from lookonce.frontend.metrics import Metrics
from lookonce.server.api_process_peers import MetricsPeers


def values(families) -> dict[str, float]:
    return {
        sample.name + str(sorted(sample.labels.items()) or ""): sample.value
        for family in families
        for sample in family.samples
    }


def process(number: int) -> Metrics:
    metrics = Metrics("m")
    metrics.prompt_tokens.inc(10**number)
    metrics.success.inc("stop")
    metrics.render.observe(0.001)
    metrics.sources.append(lambda: {"media_decodes_total:image": number})
    return metrics


def test_any_process_answers_for_all(tmp_path):
    async def scenario():
        processes = [process(number) for number in range(3)]
        peers = [MetricsPeers(tmp_path, i, 3, m.local_families) for i, m in enumerate(processes)]
        async with peers[0], peers[1], peers[2]:
            for peer in peers:
                found = values(await peer.families())
                assert found["lookonce_prompt_tokens_total"] == 111
                assert found["lookonce_request_success_total[('finished_reason', 'stop')]"] == 3
                assert found["lookonce_render_seconds_count"] == 3
                assert found["lookonce_media_decodes_total[('modality', 'image')]"] == 3

    asyncio.run(scenario())


def test_a_dead_process_is_left_out(tmp_path):
    async def scenario():
        (tmp_path / "metrics-1.sock").touch()
        async with MetricsPeers(tmp_path, 0, 3, process(1).local_families) as peers:
            assert values(await peers.families())["lookonce_prompt_tokens_total"] == 10

    asyncio.run(scenario())


def test_one_process_alone_opens_nothing(tmp_path):
    async def scenario():
        async with MetricsPeers(tmp_path, 0, 1, process(1).local_families) as peers:
            assert values(await peers.families())["lookonce_prompt_tokens_total"] == 10
            assert list(tmp_path.iterdir()) == []

    asyncio.run(scenario())
