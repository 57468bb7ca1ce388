"""Jinja2, set up as transformers does it, writes conversations to the same bytes: check_chat.py PROGRAM MODEL FILE
TEMPLATE. MODEL gives the tokenizer and its special tokens."""

import datetime
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

DATE = datetime.datetime(2025, 1, 31)
ROLES = {"human": "user", "gpt": "assistant"}


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(line)

    def _call(self, caller):
        return caller()


def raise_exception(message):
    raise TemplateError(message)


def environment():
    result = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    result.filters["tojson"] = lambda value, ensure_ascii=False, **more: json.dumps(value, ensure_ascii=ensure_ascii, **more)
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = DATE.strftime
    return result


def variables(line, tokens):
    value = json.loads(line)
    value = value if isinstance(value, dict) else {"messages": value}
    turns = value.get("conversations", [])
    messages = value.get("messages") or [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns]
    return {**tokens, "messages": messages, "tools": value.get("tools"), "documents": None, "add_generation_prompt": False}


def ours(program, folder, line):
    """What w4q prints of one conversation; None where it refuses it."""
    path = Path(folder, "line.jsonl")
    path.write_text(line, encoding="utf-8")
    command = [program, "tokenize", folder, "--chat", path, "--chat-date", f"{DATE:%Y-%m-%d}", "--render", "--json"]
    result = subprocess.run(command, capture_output=True, check=False)
    return json.loads(result.stdout)["texts"][0] if result.returncode == 0 else None


def theirs(template, values):
    try:
        return template.render(**values)
    except (TemplateError, TypeError):
        return None


program, model, file, source = sys.argv[1:]
lines = [line for line in Path(file).read_text(encoding="utf-8").split("\n") if line.strip()]
config = json.loads(Path(model, "tokenizer_config.json").read_text(encoding="utf-8"))
tokens = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
template = environment().from_string(Path(source).read_text(encoding="utf-8"))
with tempfile.TemporaryDirectory() as folder:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model, name), folder)
    shutil.copy(source, Path(folder, "chat_template.jinja"))
    for number, line in enumerate(lines, 1):
        wanted, got = theirs(template, variables(line, tokens)), ours(program, folder, line)
        if wanted != got:
            sys.exit(f"line {number}: jinja2 gives {wanted!r}, w4q {got!r}")
print(f"  {len(lines)} conversations, the same bytes")
