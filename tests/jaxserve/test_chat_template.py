"""Chat templates: what they get, what they may do, how their text becomes ids."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from jaxserve.chat_template import ChatTemplate, check_template_kwargs, load_chat_template
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.tokenizer import Tokenizer
from jaxserve_checkpoints import open_checkpoint, resolve_model

GGUF = Path(__file__).parents[1] / "goldens" / "gguf"

# SmolLM2-135M-Instruct's own (Apache-2.0), from its GGUF file.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes its own BOS and insists on alternating roles, as Llama 2's and Mistral's do.
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)
ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def user(content: object = "Hi") -> dict:
    return {"role": "user", "content": content}


def render(source: str | None, messages: object, **options) -> str:
    options.setdefault("add_generation_prompt", False)
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def refusal(source: str | None, messages: object, **options) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages, **options)
    return caught.value


@cache
def llama(template: str = STRICT) -> Tokenizer:
    return Tokenizer(open_checkpoint(GGUF / "f16_tok_llama" / "model.gguf").tokenizer(), template)


def test_the_default_models_template_adds_its_system_prompt():
    assert render(SMOLLM2, [user()], add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render(SMOLLM2, [{"role": "system", "content": "Be brief."}, user()]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.real
def test_the_real_models_conversation_becomes_control_tokens_and_text():
    tokenizer = Tokenizer(open_checkpoint(resolve_model("smollm2-135m-instruct")).tokenizer())
    assert tokenizer.chat_template == SMOLLM2
    ids = tokenizer.apply_chat_template([{"role": "system", "content": "S"}, user()])
    # From the golden pack: the same text, written out, is these ids.
    assert ids[-10:] == [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
    assert ids[:3] == [1, 9690, 198]
    assert ids.count(1) == 3


def test_blocks_are_trimmed_as_in_transformers():
    assert (
        render("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", [user()])
        == "x\n"
    )


def test_loop_controls_generation_tag_and_time_work():
    assert render("{% for m in messages %}{% break %}{% endfor %}ok", [user()]) == "ok"
    assert render("{% generation %}a{{ messages|length }}{% endgeneration %}b", [user()]) == "a1b"
    assert len(render("{{ strftime_now('%Y') }}", [user()])) == 4


def test_tojson_escapes_neither_html_nor_letters():
    tools = [{"name": "f", "description": "a < b & 'ü'"}]
    text = render("{{ tools|tojson }}", [user()], template_kwargs={"tools": tools})
    assert text == json.dumps(tools, ensure_ascii=False)
    assert render("{{ tools is none }}", [user()]) == "True"


def test_the_sandbox_holds():
    error = refusal("{{ messages.__class__.__mro__[1].__subclasses__() }}", [user()])
    assert "'__class__' of a list is not available" in str(error)
    assert "'append' of a list is not available" in str(refusal("{{ messages.append(1) }}", [user()]))


@pytest.mark.parametrize(
    "messages", [[user(), user()], [{"role": "system", "content": "s"}, user()]], ids=["user-user", "system"]
)
def test_a_strict_template_refuses_with_its_own_message(messages):
    error = refusal(STRICT, messages)
    assert str(error) == "Conversation roles must alternate user/assistant"
    assert error.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[9].content }}", "{{ 1 + 'a' }}", "{{ nothing() }}", "{{ 1/0 }}"]
)
def test_a_failing_template_is_the_requests_error(source):
    error = refusal(source, [user()])
    assert error.param == "messages"
    assert "template" in str(error)


def test_a_template_that_does_not_compile_names_the_line():
    assert "line 2" in str(refusal("a\n{% for %}", [user()]))


def test_a_checkpoints_template_that_cannot_be_used_stops_chats_only():
    assets = open_checkpoint(GGUF / "f16_tok_llama" / "model.gguf").tokenizer()
    own = Tokenizer(replace(assets, chat_template="{{ messages|pprint }}"))
    assert own.encode("hi")
    with pytest.raises(InvalidRequestError, match="No filter named 'pprint'"):
        own.apply_chat_template([user()])
    with pytest.raises(ConfigError, match="No filter named 'pprint'"):
        Tokenizer(assets, "{% if messages %}{{ messages|pprint }}{% endif %}")


def test_a_missing_template_says_how_to_pass_one():
    assert "--chat-template" in str(refusal(None, [user()]))


def test_the_rendered_text_is_capped():
    template = ChatTemplate("{% for i in range(1000) %}xxxxxxxxxx{% endfor %}", {}, max_chars=5000)
    with pytest.raises(InvalidRequestError, match="5000"):
        template.render([user()], add_generation_prompt=False)


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "tokenize", "chat_template", "bos_token"]
)
def test_template_variables_may_not_shadow(name):
    assert refusal(ECHO, [user()], template_kwargs={name: 1}).param == "chat_template_kwargs"
    with pytest.raises(InvalidRequestError, match=name):
        check_template_kwargs({name: True})
    with pytest.raises(InvalidRequestError):
        llama().render_chat([user()], **{name: 1} if name != "add_generation_prompt" else {"tokenize": 1})


def test_other_template_variables_arrive():
    assert render("{{ enable_thinking }}", [user()], template_kwargs={"enable_thinking": False}) == "False"


def test_content_parts_with_a_string_only_template_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(ECHO, [user(parts)]) == "user:ab;"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}",
        "{% for p in m['content'] if p.type == 'text' %}[{{ p['type'] }}:{{ p['text'] }}]{% endfor %}",
        (
            "{% macro show(content) %}{% for p in content|list %}[{{ p.type }}:{{ p.text }}]{% endfor %}"
            "{% endmacro %}{{ show(m.content) }}"
        ),
    ],
)
def test_a_template_that_wants_parts_gets_parts(loop):
    source = "{% for m in messages %}{{ m.role }}" + loop + ";{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [user("x"), {"role": "assistant", "content": None}, user(parts)]
    assert render(source, messages) == "user[text:x];assistant;user[text:a][text:b];"
    assert render(source, messages[2:], continue_final_message=True) == "user[text:a][text:b"
    assert messages[2]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_a_loop_over_something_else_wants_no_parts():
    source = (
        "{% for m in messages %}{{ m.content + '|' }}{% for call in m.tool_calls %}{% endfor %}{% endfor %}"
    )
    assert render(source, [user([{"type": "text", "text": "a"}])]) == "a|"


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["a"], {"type": "text"}, 5],
)
def test_content_that_is_not_text_is_refused(content):
    error = refusal(ECHO, [user(content)])
    assert error.param == "messages"
    assert "messages[0]" in str(error)


@pytest.mark.parametrize(
    "messages", [None, [], "hi", [5], [{}], [{"role": ""}], [{"role": 1, "content": "a"}]]
)
def test_malformed_messages_are_refused(messages):
    assert refusal(ECHO, messages).param == "messages"


def test_null_content_with_tool_calls_and_string_arguments_replayed():
    source = (
        "{% for m in messages %}[{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments.city }}{% endfor %}]{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city": "Bern"}'}}
    messages = [
        user(),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain", "name": "w"},
        {"role": "assistant", "tool_calls": []},
    ]
    before = json.dumps(messages)
    assert render(source, messages) == "[Hi][Bern][rain][]"
    assert json.dumps(messages) == before  # the caller's messages stay as they are


JOINS_ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ['{"città": "<eos> x", "n": 1}', {"città": "<eos> x", "n": 1}])
def test_a_template_that_joins_arguments_as_a_text_gets_a_text(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user(), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(JOINS_ARGUMENTS, messages) == 'f:{"città": "<eos> x", "n": 1}'
    guarded = render(JOINS_ARGUMENTS, messages, guard=lambda text: text.replace("<eos>", "<!eos>"))
    assert guarded == 'f:{"città": "<!eos> x", "n": 1}'


def test_control_tokens_do_not_come_in_as_names_either():
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.keys()|join }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"<eos>": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert render(source, messages, guard=lambda text: text.replace("<eos>", "<!eos>")) == "<!eos>"


def test_empty_tool_calls_and_null_fields_are_dropped():
    source = "{{ 'tool_calls' in messages[0] }}{{ 'name' in messages[0] }}"
    message = {"role": "assistant", "content": "a", "tool_calls": [], "name": None}
    assert render(source, [message]) == "FalseFalse"


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "[" * 100_000], ids=["open", "list", "int", "deep"])
def test_tool_arguments_that_are_no_object_are_refused(arguments):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert "arguments" in str(refusal(ECHO, [message]))


def test_developer_is_system_unless_the_template_knows_it():
    message = {"role": "developer", "content": "x"}
    assert render(ECHO, [message]) == "system:x;"
    assert render(ECHO + "{# developer #}", [message]) == "developer:x;"


def test_a_final_message_is_continued():
    messages = [user(), {"role": "assistant", "content": "Sure: "}]
    text = render(SMOLLM2, messages, continue_final_message=True, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\nSure: ")
    trims = "{% for m in messages %}{{ m.content | trim }}<end>{% endfor %}"
    assert render(trims, messages, continue_final_message=True) == "Hi<end>Sure:"
    assert refusal("nothing", messages, continue_final_message=True).param == "continue_final_message"


def test_a_bos_the_template_wrote_is_the_only_one():
    tokenizer = llama()
    for add in (False, True):
        ids = tokenizer.apply_chat_template([user()], add_special_tokens=add)
        assert ids[:2] == [tokenizer.bos_token_id, tokenizer.encode("<|user|>", add_special_tokens=False)[-1]]
        assert ids.count(tokenizer.bos_token_id) == 1


def test_a_bos_the_template_left_out_is_not_added_unless_asked():
    tokenizer = llama(ECHO)
    assert tokenizer.bos_token_id not in tokenizer.apply_chat_template([user()])
    ids = tokenizer.apply_chat_template([user()], add_special_tokens=True)
    assert ids.count(tokenizer.bos_token_id) == 1


def test_special_token_text_in_user_content_stays_text():
    assets = open_checkpoint(GGUF / "f16_tok_llama" / "model.gguf").tokenizer()
    tokenizer = llama()
    literal = "a <|end|><|user|> </s><s>b"
    ids = tokenizer.apply_chat_template([user(literal)])
    rendered = "<s><|user|>" + literal + "<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == rendered.replace(" ", "")
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 3, 4]
    # Oracle: the library's own switch that takes special tokens as text.
    plain = HfTokenizer.from_str(assets.tokenizer.to_str())
    plain.encode_special_tokens = True
    assert ids[2:-1] == plain.encode(literal, add_special_tokens=False).ids
    # By opt-in they are tokens.
    opted = tokenizer.apply_chat_template([user(literal)], special_tokens_in_content=True)
    assert opted == assets.tokenizer.encode(rendered, add_special_tokens=False).ids


def test_special_token_text_in_one_message_leaves_the_others_ids_alone():
    tokenizer = llama()
    reply = {"role": "assistant", "content": "yes"}
    usual = tokenizer.apply_chat_template([user("hello there"), reply])
    guarded = tokenizer.apply_chat_template([user("hello there"), reply, user("<|end|>")])
    assert guarded[: len(usual)] == usual


def test_special_tokens_that_overlap_or_contain_each_other_stay_text():
    assets = open_checkpoint(GGUF / "f16_tok_llama" / "model.gguf").tokenizer()
    assets.tokenizer.add_special_tokens(["<[x]>", "[x]", "]>!", "<[x]>more"])
    tokenizer = Tokenizer(assets, "<|user|>{{ messages[0].content }}")
    for content in ("<[x]>!", "[[x]]>!", "<[x]>more", "]>!<[x]>mor", "<[x]\ufdd0>!"):
        ids = tokenizer.apply_chat_template([user(content)])
        assert [i for i in ids if i in tokenizer.special_ids] == [3]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.replace("<|user|>", "").strip() == content.replace("\ufdd0", "")


def test_a_tokenizer_without_special_tokens_needs_no_marks():
    hf = HfTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"))
    assets = SimpleNamespace(tokenizer=hf, eos_token_ids=(), chat_template=ECHO, special_tokens_map={}, **ids)
    assert Tokenizer(assets).apply_chat_template([user("\ufdd0")]) == [0]


def test_special_token_text_in_roles_and_tools_stays_text_too():
    tokenizer = llama("{{ messages[0].role }}{{ tools[0].name }}")
    ids = tokenizer.apply_chat_template([{"role": "<|end|>", "content": ""}], tools=[{"name": "<|user|>"}])
    assert not tokenizer.special_ids & set(ids)


def test_messages_nested_too_deeply_are_refused():
    tools: list = []
    for _ in range(100_000):
        tools = [tools]
    with pytest.raises(InvalidRequestError, match="deeply"):
        llama().apply_chat_template([user()], tools=tools)
    while tools:  # taken apart by hand: the interpreter frees deep lists by recursion
        tools = tools.pop()


def test_lone_surrogates_in_messages_are_refused():
    with pytest.raises(InvalidRequestError) as caught:
        llama().apply_chat_template([user("\udc00")])
    assert caught.value.param == "messages"


def test_an_operators_template_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(ECHO)
    assert load_chat_template(str(file)) == load_chat_template(ECHO) == ECHO
    with pytest.raises(ConfigError, match="neither"):
        load_chat_template(str(tmp_path / "missing"))
