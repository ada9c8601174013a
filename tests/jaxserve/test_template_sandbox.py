"""No template, and no messages that drive one, takes long or builds what does not fit."""

import re
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.chat_template import ChatTemplate
from jaxserve.errors import InvalidRequestError

MESSAGES = [{"role": "user", "content": "Hi"}]

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop's condition": "{% for a in range(99999) if range(99999)|list|length == 0 %}{% endfor %}",
    "macros that call twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": (
        "{% for x in [1, 2] recursive %}{% if loop.depth0 < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"
    ),
    "call blocks": (
        "{% macro f(n) %}{% if n %}{% call f(n - 1) %}{% endcall %}{% call f(n - 1) %}{% endcall %}"
        "{{ caller and '' }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "filters in a loop": (
        "{% for a in range(99999) %}{% set x = range(99999)|map('string')|list %}{% endfor %}"
    ),
    "messages as counters": (
        "{% for a in m %}{% for b in m %}{% for c in m %}{% endfor %}{% endfor %}{% endfor %}"
    ),
}

SWELLING = {
    "text times a number": "{{ 'a' * 10**9 }}",
    "a number times text": "{{ 10**9 * 'a' }}",
    "a list times a number": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 2 ** (10**9) }}",
    "powers by multiplication": (
        "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
    ),
    "a huge range": "{{ range(10**9)|list|length }}",
    "doubling with +": (
        "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "doubling with ~": (
        "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "doubling with a set block": (
        "{% set n = namespace(s='ab') %}{% for i in range(40) %}"
        "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}"
    ),
    "doubling by macros": (
        "{% macro f(s, n) %}{% if n %}{{ f(s ~ s, n - 1) }}{% endif %}{% endmacro %}{{ f('ab', 40) }}"
    ),
    "doubling lists of one another": (
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "doubling dicts of one another": (
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
        "{{ n.x|tojson }}"
    ),
    "many slices": (
        "{% set s = 'a' * 4000000 %}"
        "{% macro f(s, n) %}{% set t = s[1:] %}{{ f(t, n - 1) if n }}{% endmacro %}{{ f(s, 200) }}"
    ),
    "center": "{{ 'a'|center(10**9) }}",
    "center, folded": "{{ 'a'|center(1000000000) }}",
    "str.center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "rjust": "{{ 'a'.rjust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "bytes.ljust": "{{ 'a'.encode().ljust(10**9)|length }}",
    "to_bytes": "{{ (5).to_bytes(10**9, 'big')|length }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**9) }}",
    "translate": "{{ 'aaaa'.translate({97: 'b'}) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format_map width": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format width of a field": "{{ '{:{}}'.format(1, 10**9) }}",
    "format many times": "{% set s = 'a' * 1000000 %}{{ ('{0}' * 1000).format(s)|length }}",
    "% width": "{{ '%1000000000d' % 1 }}",
    "% width of a field": "{{ '%*d' % (10**9, 1) }}",
    "% many times": "{% set s = 'a' * 1000000 %}{{ ('%(s)s' * 1000) % {'s': s} }}",
    "filter format": "{{ '%1000000000d'|format(1) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "indent by a text": "{% set s = 'a' * 1000000 %}{{ ('\n' * 1000)|indent(s)|length }}",
    "replace": "{% set s = 'a' * 1000000 %}{{ ('a' * 1000)|replace('a', s)|length }}",
    "str.replace": "{% set s = 'a' * 1000000 %}{{ ('a' * 1000).replace('a', s)|length }}",
    "replace nothing": "{% set s = 'a' * 1000000 %}{{ ('a' * 1000).replace('', s)|length }}",
    "join": "{% set s = 'a' * 1000000 %}{{ range(1000)|join(s)|length }}",
    "str.join": "{% set s = 'a' * 1000000 %}{{ s.join(['a'] * 1000)|length }}",
    "join of a generator": (
        "{% set s = 'a' * 1000000 %}{{ ([''] * 1000)|map('default', s, true)|join|length }}"
    ),
    "a list of one text": "{% set s = 'a' * 1000000 %}{{ ([s] * 1000)|string|length }}",
    "batch": "{{ [1]|batch(10**9, 0)|list|length }}",
    "slice": "{{ [1]|slice(10**9)|list|length }}",
    "tojson indent": "{{ [1, 2]|tojson(indent=10**9) }}",
    "tojson separators": "{% set s = 'a' * 1000000 %}{{ range(1000)|list|tojson(separators=(s, s))|length }}",
    "round": "{{ 1|round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 9)|sum(start=[]) }}",
    "rfind": "{% set s = 'a' * 4000000 %}{{ s.rfind('b' ~ s[:2000000]) }}",
    "lipsum": "{{ lipsum(10**9) }}",
    "strftime": "{{ strftime_now('%Y' * 100000) }}",
    "output": (
        "{% for i in range(99999) %}{% for j in range(99) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}"
    ),
}
WHY = "too large|too many|too long|longer than|not available|numbers only|Range too big|'lipsum' is undefined"


def render(source, messages=MESSAGES, seconds=5.0, **kwargs):
    template = ChatTemplate(source, {}, max_seconds=seconds)
    return template.render(messages, add_generation_prompt=False, template_kwargs=kwargs)


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_rendering_ends_at_its_deadline(source):
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"longer than 0.2 seconds|recursion") as caught:
        render(source, seconds=0.2, m=list(range(10_000)))
    assert caught.value.param == "messages"
    assert time.monotonic() - start < 4  # generous: one operation may be under way, and machines are busy


@pytest.mark.parametrize("source", SWELLING.values(), ids=SWELLING)
def test_what_would_swell_is_refused_before_it_does(source):
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            render(source)
        assert re.search(WHY, str(caught.value))
        assert tracemalloc.get_traced_memory()[1] < 400 * 2**20
    finally:
        tracemalloc.stop()


def test_renderings_side_by_side_have_deadlines_of_their_own():
    endless = ENDLESS["nested loops"]
    before = set(threading.enumerate())
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(render, endless, seconds=0.5) for _ in range(2)]
        quick = [pool.submit(render, "{% for m in messages %}{{ m.content }}{% endfor %}") for _ in range(20)]
        assert {task.result() for task in quick} == {"Hi"}
        for task in slow:
            with pytest.raises(InvalidRequestError, match=r"longer than 0.5 seconds"):
                task.result()
        # The same threads are as good as new.
        assert pool.submit(render, "{{ messages|length }}", seconds=0.5).result() == "1"
    assert set(threading.enumerate()) <= before


def test_what_templates_do_every_day_works():
    source = (
        "{%- set ns = namespace(found=false, parts=[]) -%}"
        "{%- for m in messages[::-1] if m.role == 'user' -%}"
        "{%- set ns.found = loop.last -%}{%- set ns.parts = ns.parts + [m.content.strip() ~ '!'] -%}"
        "{%- endfor -%}"
        "{{ ns.parts|join(', ') }} {{ ', '.join(ns.parts|map('upper')) }} "
        "{{ '%s-%03d' % ('a', 7) }} {{ '{:>4}|{}'.format('b', 10000000000) }} {{ '%s'|format('c') }} "
        "{{ 'ab' * 2 }} {{ [1, 2]|sum }} {{ (1, 'x')|tojson }} {{ {'k': [1]}|tojson(indent=1) }} "
        "{{ 'x.y'.split('.')[-1] }} {{ 2 ** 8 }} {{ 7 % 4 }} {{ 1.25|round(1) }} {{ 'é'.encode()|length }} "
        "{% for a, b in {'p': 1}|items %}{{ a }}{{ b }}{{ loop.length }}{% endfor %} "
        "{% macro f(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call f(3) %}in{% endcall %} "
        "{% set text %}block {{ ns.found }}{% endset %}{{ text|trim|replace('b', 'B') }} "
        "{{ namespace(x=namespace()) }} "
        "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": f" {i} "} for i in (1, 2)]) == (
        '2!, 1! 2!, 1! a-007    b|10000000000 c abab 3 [1, "x"] {\n "k": [\n  1\n ]\n} y 256 3 1.2 2 '
        "p11 <3>in Block True <Namespace> 12"
    )


def test_a_large_conversation_is_rendered():
    messages = [{"role": "user", "content": "x" * 100}] * 20_000
    assert len(
        render("{% for m in messages %}{{ '<' + m.role + '>' ~ m.content }}{% endfor %}", messages)
    ) == (20_000 * 106)
