"""No template, and no messages that drive one, takes long, builds too much, or uses what is not listed."""

import re
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from jaxserve.chat_template import ChatTemplate, _environment, check_template
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.template_operations import MAX_TEXT, METHODS

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
    "lines": "{% set s = '\n' * 4000000 %}{{ s.splitlines()|length }}",
    "indent of many lines": "{% set s = '\r' * 4000000 %}{{ s|indent(0, true)|length }}",
    "a list of letters": "{% set s = '字' * 4000000 %}{{ s|list|length }}",
    "letters to sort": "{% set s = '字' * 4000000 %}{{ s|sort|length }}",
    "split": "{% set s = 'a ' * 2000000 %}{{ s.split()|length }}",
    "split at a letter": "{% set s = 'aa' * 2000000 %}{{ s.split('a')|length }}",
    "rsplit": "{% set s = 'aa' * 2000000 %}{{ s.rsplit('a')|length }}",
    "title": "{% set s = 'a ' * 2000000 %}{{ s|title|length }}",
    "trim": "{% set s = 'a' * 3000000 %}{{ s|trim('b' * 3000000 ~ 'a')|length }}",
    "str.strip": "{% set s = 'a' * 3000000 %}{{ s.strip('b' * 3000000 ~ 'a')|length }}",
    "rsplit by a long text": "{% set s = 'a' * 4000000 %}{{ s.rsplit('b' ~ s[:2000000])|length }}",
    "a long format": "{{ (':' * 80000).format() }}",
    "a format of many fields": "{% set s = '{}' * 1000000 %}{{ s.format() }}",
    "a long %": "{% set s = '1a' * 1000000 %}{{ s % () }}",
    "a long path": "{% set s = 'a.' * 1000000 %}{{ [{'a': 1}]|map(attribute=s)|list }}",
    "long paths": "{% set s = 'a,' * 1000000 %}{{ [{'a': 1}]|sort(attribute=s) }}",
    "a long path to select by": "{% set s = 'a.' * 1000000 %}{{ [{'a': 1}]|selectattr(s)|list }}",
    "one text to lower many times": (
        "{% set s = 'A' * 4000000 %}{{ range(99999)|map('replace', '', s)|sort|length }}"
    ),
    "a text many times, to sort": (
        "{% set s = 'A' * 4000000 %}{{ ([none] * 99999)|map('default', s, true)|sort|length }}"
    ),
    "doubling by views": (
        "{% set n = namespace(x={'a': 1}) %}"
        "{% for i in range(60) %}{% set n.x = {'a': n.x.items(), 'b': n.x.items()} %}{% endfor %}{{ n.x }}"
    ),
    "doubling by varargs": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}"
        "{% endmacro %}{{ f(60, 1) }}"
    ),
    "doubling by kwargs": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1, a=kwargs, b=kwargs) }}{% else %}{{ kwargs }}{% endif %}"
        "{% endmacro %}{{ f(60, a=1) }}"
    ),
    "a chain of large texts": (
        "{% set n = namespace(x=0) %}{% for i in range(400) %}"
        "{% set n.x = namespace(t=('字' * 4000000), next=n.x) %}{% endfor %}"
    ),
    "a chain of lists of letters": (
        "{% set n = namespace(x=0) %}{% set s = '字' * 200000 %}{% for i in range(400) %}"
        "{% set n.x = namespace(t=s|list, next=n.x) %}{% endfor %}"
    ),
    "format width": "{{ '{:1000000000}'.format(1) }}",
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
    "tojson indent": "{{ [1, 2]|tojson(indent=10**9) }}",
    "tojson separators": "{% set s = 'a' * 1000000 %}{{ range(1000)|list|tojson(separators=(s, s))|length }}",
    "round": "{{ 1|round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 9)|sum(start=[]) }}",
    "rfind": "{% set s = 'a' * 4000000 %}{{ s.rfind('b' ~ s[:2000000]) }}",
    "strftime": "{{ strftime_now('%Y' * 100000) }}",
    "output": (
        "{% for i in range(99999) %}{% for j in range(99) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}"
    ),
}
WHY = "too large|too many|too long|longer than|not available|numbers only|Range too big"

# What is not listed is refused by its name; sandbox escapes are among it.
REFUSED = {
    **{
        f"method {name}": ("{{ 'a'." + name + "(9) }}", f"'{name}' of a str is not available")
        for name in (
            *(
                "center",
                "ljust",
                "rjust",
                "zfill",
                "encode",
                "expandtabs",
                "translate",
                "format_map",
                "maketrans",
            ),
            *("__class__", "__add__", "__format__", "casefold", "swapcase"),
        )
    },
    **{
        f"filter {name}": ("{{ 'a'|" + name + " }}", f"No filter named '{name}'")
        for name in (
            *(
                "attr('upper')",
                "batch(1)",
                "center(9)",
                "filesizeformat",
                "forceescape",
                "groupby('a')",
                "pprint",
            ),
            *(
                "random",
                "slice(3)",
                "striptags",
                "urlize",
                "urlencode",
                "wordcount",
                "wordwrap(1)",
                "xmlattr",
            ),
        )
    },
    **{
        f"function {name}": ("{{ " + name + "(9) }}", f"'{name}' is undefined")
        for name in (*("lipsum", "cycler", "joiner", "open", "__import__"),)
    },
    "test": ("{{ 'a' is filter }}", "No test named 'filter'"),
    "a filter in map": ("{{ ['a']|map('pprint')|list }}", "No filter named 'pprint'"),
    "a filter in a condition": ("{% if messages %}{{ 'a'|pprint }}{% endif %}", "No filter named 'pprint'"),
    "to_bytes": ("{{ (5).to_bytes(9, 'big') }}", "'to_bytes' of a int"),
    "fromhex": ("{{ (1.5).fromhex('1') }}", "'fromhex' of a float"),
    "a method by item": ("{{ 'a'['center'](9) }}", "'center' of a str"),
    "a method by attribute": ("{{ ['a']|map(attribute='center')|first()(9) }}", "'center' of a str"),
    "an attribute of map": ("{{ (['a']|map(attribute='__class__')|first).x }}", "'__class__' of a str"),
    "globals of a macro": (
        "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
        "'__call__' of a Macro",
    ),
    "globals of a function": ("{{ raise_exception.__globals__.x }}", "'__globals__' of a function"),
    "globals of a loop": (
        "{% for x in [1] %}{{ loop.__init__.x }}{% endfor %}",
        "'__init__' of a LoopContext",
    ),
    "namespace": ("{{ namespace.__init__.x }}", "'__init__' of a type"),
    "dict.fromkeys": ("{{ dict.fromkeys('ab') }}", "'fromkeys' of a type"),
    "format's attributes": ("{{ '{0.__class__.x}'.format(1) }}", "'__class__' of a int"),
    "a stored format": ("{% set f = '{0.__class__.x}'.format %}{{ f(1) }}", "'__class__' of a int"),
    "a text of another kind": (
        "{% autoescape true %}{{ ('a'|e).center(9) }}{% endautoescape %}",
        "autoescape",
    ),
    "an escaped text": ("{{ ('a'|e).center(1500000000) }}", "'center' of a str"),
    "a safe text": ("{{ ('a'|safe).center(1500000000) }}", "'center' of a str"),
    "a changed list": ("{{ messages.append(1) }}", "'append' of a list"),
    "a changed dict": ("{{ messages[0].update({}) }}", "'update' of a dict"),
    "a call of a text": ("{{ 'a'() }}", "calling 'str'"),
    "a block": ("{% block b %}{% endblock %}{{ self.b() }}", "calling"),
    "include": ("{% include 'a' %}", "loader"),
}


@contextmanager
def measured(mebibytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 2**20
    finally:
        tracemalloc.stop()


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
    start = time.monotonic()
    with measured(300), pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert re.search(WHY, str(caught.value))
    assert time.monotonic() - start < 8  # most take milliseconds, and the deadline is 5 s


@pytest.mark.parametrize(("source", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_listed_is_refused_by_name(source, why):
    with measured(20), pytest.raises(InvalidRequestError) as caught:
        render(source)
    assert why.split("(")[0] in str(caught.value)


# Of `t`, a text of as many characters as there may be, and `l`, a list of texts.
CALLS = (
    "t|default('')", "l|map('upper')|list", "l|select('eq', 'x')|list", "l|reject('in', 'x')|list",
    "l|selectattr('x')|list", "l|rejectattr('x')|list", "l|map('length')|sum", "l|join('')", "l|list",
    "l|last", "l|max", "l|min", "l|sort", "l|unique|list", "l|reverse|list", "l|string", "l|tojson(indent=1)",
    "{'a': t}|dictsort", "{'a': t}|items|list", "t[:60000]|int", "t[:60000]|float", "1.5|round(2)", "1|abs",
    "t|replace('bb', 'c')", "t[:60000]|format", "t[:60000]|title", "t[:250000].replace('b', '\\n')|indent",
    "t.endswith(t)", "t.startswith(t)", "t.count('ab')", "t.find('ba' * 999999)", "t.index('b')",
    "t.partition('b')", "t.removeprefix(t)", "t.removesuffix(t)", "t.rfind('abababba')", "t[:60000].format()",
    "''.join(l)", "t.replace('ab', 'c')", "t.split('abab' * 9)", "t.rsplit('ab' * 9, 3)", "t.strip('ba')",
    "t.lstrip('ba')", "t.rstrip('ba')",
)  # fmt: skip
SEEN = {name for call in CALLS for name in re.findall(r"[|.](\w+)", call)}
OTHERS = (
    *(f"t|{name}" for name in _environment().filters if name not in SEEN),
    *(f"t.{name}()" for name in METHODS[str] if name not in SEEN),
)


@pytest.mark.parametrize("call", [*CALLS, *OTHERS])
def test_every_filter_and_method_is_quick_on_the_largest_values(call):
    source = "{% set x = " + call + " %}"
    values = {"t": "字b" * (MAX_TEXT // 2), "l": ["字" * 100 + str(i) for i in range(10_000)]}

    def outcome():
        try:
            return render(source, **values)
        except InvalidRequestError as error:
            return str(error)

    start = time.monotonic()
    text = outcome()
    assert time.monotonic() - start < 2
    assert not text or re.search("too large|too long", text)
    with measured(300):
        outcome()


def test_a_template_at_start_names_the_filter_or_test_that_does_not_exist():
    for source in (
        "{{ 'a'|pprint }}",
        "x\n{% if y %}{{ 'a'|pprint }}{% endif %}",
        "{% if y is callable %}{% endif %}",
    ):
        with pytest.raises(ConfigError, match=r"line [12]: No (filter|test) named '(pprint|callable)'"):
            check_template(source)
    with pytest.raises(ConfigError, match="nested too deeply"):
        check_template("{% for x in y %}" * 30 + "{% endfor %}" * 30)
    check_template("{% for m in messages %}{{ m.content|trim }}{% endfor %}")


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
        "{{ 'x.y'.split('.')[-1] }} {{ 2 ** 8 }} {{ 7 % 4 }} {{ 1.25|round(1) }} {{ 'é'|length }} "
        "{% for a, b in {'p': 1}|items %}{{ a }}{{ b }}{{ loop.length }}{% endfor %} "
        "{% macro f(x) %}<{{ x }}>{{ caller() }}{% endmacro %}{% call f(3) %}in{% endcall %} "
        "{% set text %}block {{ ns.found }}{% endset %}{{ text|trim|replace('b', 'B') }} "
        "{{ namespace(x=namespace()) }} "
        "{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}"
    )
    assert render(source, [{"role": "user", "content": f" {i} "} for i in (1, 2)]) == (
        '2!, 1! 2!, 1! a-007    b|10000000000 c abab 3 [1, "x"] {\n "k": [\n  1\n ]\n} y 256 3 1.2 1 '
        "p11 <3>in Block True <Namespace> 12"
    )


def test_a_large_conversation_is_rendered():
    messages = [{"role": "user", "content": "x" * 100}] * 20_000
    assert len(
        render("{% for m in messages %}{{ '<' + m.role + '>' ~ m.content }}{% endfor %}", messages)
    ) == (20_000 * 106)
