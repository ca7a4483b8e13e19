"""Chat templates with tools in the manner of real models, one for each way to write calls. Each renders an answer as
its model writes it."""

from __future__ import annotations

_CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
HERMES = _CHATML.replace(
    "CALL",
    """{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}""",
)
QWEN3_CODER = _CHATML.replace(
    "CALL",
    """{%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}""",
)
LLAMA3_JSON = """\
{{- '<|start|>system<|stop|>\\n\\n' }}
{%- if tools %}{{- 'Respond in the format {"name": function name, "parameters": object}.\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
{{- '<|start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|stop|>\\n\\n' }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '; ' if not loop.first else '' }}{{- '{"name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson + '}' }}
{%- endfor %}
{%- else %}{{- message.content | trim }}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}
"""
PYTHONIC = """\
{{- '<|start|>system<|stop|>\\n\\n' }}
{%- if tools %}{{- 'Use the format [func_name1(param1=value1), func_name2()].\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}{% endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
{{- '<|start|>' + message.role + '<|stop|>\\n\\n' + (message.content or '') }}
{%- if message.tool_calls %}{{- '[' }}
{%- for call in message.tool_calls %}{{- ', ' if not loop.first else '' }}{{- call.function.name + '(' }}
{%- for name, value in call.function.arguments | items %}
{{- ', ' if not loop.first else '' }}{{- name + '=' + (value | tojson if value is string else value | string) }}
{%- endfor %}{{- ')' }}
{%- endfor %}{{- ']' }}{% endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|stop|>\\n\\n' }}{% endif %}
"""
_MISTRAL = """\
{{- '<s>' }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids must have nine characters') }}{% endif %}
{{- '[/TOOL_RESULTS]' }}
{%- else %}{{- message.content or '' }}
{%- if message.tool_calls %}CALLS{% endif %}{{- '</s>' }}
{%- endif %}
{%- endfor %}
"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{{- (', ' if not loop.first else '') + '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}' }}
{%- endfor %}{{- ']' }}""",
)
MISTRAL_NAMED = _MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
)
_DEEPSEEK = """\
{{- '<｜begin▁of▁sentence｜>' }}
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- elif message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{- message.content or '' }}
{%- if message.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}CALL{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% endif %}{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
"""
DEEPSEEK = _DEEPSEEK.replace(
    "CALL",
    """{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
{{- '<｜tool▁call▁end｜>' }}""",
)
DEEPSEEK_FENCED = _DEEPSEEK.replace(
    "CALL",
    """{{- '\\n' if not loop.first else '' }}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
{{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}""",
)
OPENAI = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{% endfor %}{{- '<|end|>' }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|start|>assistant' }}
{%- if message.reasoning_content %}
{{- '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|><|start|>assistant' }}
{%- endif %}
{%- if message.tool_calls %}
{%- if message.content %}
{{- '<|channel|>commentary<|message|>' + message.content + '<|end|><|start|>assistant' }}
{%- endif %}
{%- for call in message.tool_calls %}
{{- '<|end|><|start|>assistant' if not loop.first else '' }}
{{- '<|channel|>commentary to=functions.' + call.function.name + ' <|constrain|>json<|message|>' }}
{{- call.function.arguments | tojson }}
{%- endfor %}{{- '<|call|>' }}
{%- else %}{{- '<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""
TEMPLATES = {
    "hermes": (HERMES, "<|im_end|>"),
    "qwen3_coder": (QWEN3_CODER, "<|im_end|>"),
    "llama3_json": (LLAMA3_JSON, "<|eot|>"),
    "pythonic": (PYTHONIC, "<|eot|>"),
    "mistral": (MISTRAL, "</s>"),
    "mistral named": (MISTRAL_NAMED, "</s>"),
    "deepseek": (DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "deepseek fenced": (DEEPSEEK_FENCED, "<｜end▁of▁sentence｜>"),
    "openai": (OPENAI, "<|call|>"),
}
"""Name of a writer -> the template, and the token that ends an answer with calls."""
