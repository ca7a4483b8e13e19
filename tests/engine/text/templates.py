"""Chat templates in the manner of real models, written for these tests."""

CHATML = """\
{%- for message in messages %}
{{- '<|turn|>' + message.role + '\n' + message.content + '<|end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\n' }}{% endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'Cutting knowledge: ' + strftime_now('%Y') %}
{%- endif %}
{{- '<|start|>system<|stop|>\n\n' + system_message }}
{%- if tools is not none %}
{%- for t in tools %}
{{- '\n\n' }}{{- t | tojson(indent=4) }}
{%- endfor %}
{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
{%- if message.role not in ['user', 'assistant', 'tool', 'system'] %}
{{- raise_exception('Unknown role: ' + message.role) }}
{%- endif %}
{{- '<|start|>' + message['role'] + '<|stop|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start|>assistant<|stop|>\n\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- generation %}
    {{- message.content }}
    {%- endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""

ALL = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN}
APPENDING = ("chatml", "llama", "qwen")
"""Templates that render a conversation as a continuation of its beginning; Mistral's moves the system text."""
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
