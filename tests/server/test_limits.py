"""How much is generated: what the client asked for, or what the context leaves of a default."""

from __future__ import annotations

import pytest

from lookonce.errors import BadRequestError
from lookonce.frontend.generation import prepared
from lookonce.frontend.sampling_params import SamplingDefaults, default_sampling
from lookonce.types.request import RenderedPrompt
from lookonce.types.sampling import SamplingParams

CONTEXT = 200
"""Of the reciting engine."""
RECOMMENDED = SamplingDefaults(max_new_tokens=64)
ROUTES = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}
LIMITS = [
    ("/v1/chat/completions", "max_tokens"),
    ("/v1/chat/completions", "max_completion_tokens"),
    ("/v1/completions", "max_tokens"),
    ("/v1/responses", "max_output_tokens"),
]


async def ask(site, route: str, length: int, **fields: object):
    """With a prompt of so many tokens."""
    given: object = "x" * length
    if ROUTES[route] == "messages":
        given = [{"role": "user", "content": given}]
    return await site.client.post(route, json={ROUTES[route]: given, **fields})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("left", [1, 5, 15])
def test_a_default_is_shortened_to_what_the_context_leaves(on_site, route, left):
    async def scenario(site):
        site.services.defaults = RECOMMENDED
        response = await ask(site, route, CONTEXT - left)
        assert response.status_code == 200
        assert site.engine.samplings[0].max_tokens == left

    on_site(scenario)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_a_default_that_fits_stays(on_site, route):
    async def scenario(site):
        site.services.defaults = RECOMMENDED
        assert (await ask(site, route, CONTEXT - 64)).status_code == 200
        assert site.engine.samplings[0].max_tokens == 64

    on_site(scenario)


@pytest.mark.parametrize(("route", "name"), LIMITS)
@pytest.mark.parametrize("asked", [6, 64])
def test_a_limit_that_was_asked_for_is_refused_by_its_name(on_site, route, name, asked):
    async def scenario(site):
        site.services.defaults = RECOMMENDED
        response = await ask(site, route, CONTEXT - 5, **{name: asked})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == name
        assert "max_tokens" not in error["message"] or name == "max_tokens"

    on_site(scenario)


@pytest.mark.parametrize(("route", "name"), LIMITS)
def test_a_limit_that_cannot_be_is_refused_by_its_name(on_site, route, name):
    async def scenario(site):
        error = (await ask(site, route, 5, **{name: -1})).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(name)

    on_site(scenario)


@pytest.mark.parametrize("route", ROUTES)
def test_a_prompt_that_fills_the_context_is_refused(on_site, route):
    async def scenario(site):
        site.services.defaults = RECOMMENDED
        response = await ask(site, route, CONTEXT)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert site.engine.samplings == []

    on_site(scenario)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_rendered_for_an_engine_fits_it(on_site, route):
    async def scenario(site):
        site.services.defaults = RECOMMENDED
        given = "x" * (CONTEXT - 5)
        body = {"prompt": given, "messages": [{"role": "user", "content": given}]}
        asked = {ROUTES[route]: body[ROUTES[route]]}
        rendered = (await site.client.post(f"{route}/render", json=asked)).json()
        assert rendered["sampling_params"]["max_tokens"] == 5
        kept = await site.client.post(f"{route}/render", json={**asked, "max_tokens": 6})
        assert kept.json()["sampling_params"]["max_tokens"] == 6
        site.renderer.rendered.clear()  # what is rendered for others is not pinned here

    on_site(scenario)


def test_from_python_the_recommendation_is_shortened_too(on_site):
    async def scenario(site):
        site.services.defaults = RECOMMENDED
        prompt = RenderedPrompt(list(b"x" * (CONTEXT - 5)), scope=b"")
        with prepared(site.services, prompt, default_sampling(RECOMMENDED)) as generation:
            assert [piece async for piece in generation.pieces()]
        assert site.engine.samplings[0].max_tokens == 5
        with (
            pytest.raises(BadRequestError, match="6 are to be generated"),
            prepared(site.services, prompt, SamplingParams(max_tokens=6)),
        ):
            pass

    on_site(scenario)
