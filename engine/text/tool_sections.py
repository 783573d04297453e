"""Tools sections for chat templates of models with tools that do not write the tools themselves."""

import re

_DEEPSEEK_V31 = """
{%- if tools %}
  {%- set section = namespace(text="## Tools\\nYou have access to the following tools:\\n") %}
  {%- for tool in tools %}
    {%- set section.text = section.text + "\\n### " + tool.function.name %}
    {%- set section.text = section.text + "\\nDescription: " + (tool.function.description or "") %}
    {%- set section.text = section.text + "\\n\\nParameters: " + (tool.function.parameters or {}) | tojson + "\\n" %}
  {%- endfor %}
  {%- set section.text = section.text + "\\nIMPORTANT: ALWAYS adhere to this exact format for tool use:\\n"
    + "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
    + "{additional_tool_calls}<｜tool▁calls▁end｜>\\n\\nWhere:\\n"
    + "- `tool_call_name` must be an exact match to one of the available tools\\n"
    + "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\\n"
    + "- For multiple tool calls, chain them directly without separators or spaces\\n" %}
  {%- set has_system = messages[0].role == "system" %}
  {%- set text = (messages[0].content + "\\n\\n" if has_system else "") + section.text %}
  {%- set messages = [{"role": "system", "content": text}] + (messages[1:] if has_system else messages) %}
{%- endif %}"""
"""The section as documented for DeepSeek-V3.1, behind the system message."""
_IS_V31 = re.compile(r"""<｜tool▁call▁begin｜>["']\s*\+\s*tool\[.function.\]\[.name.\]""")


def complete(template: str) -> str:
    """Return the template with a tools section if it needs one."""
    return _DEEPSEEK_V31 + template if _IS_V31.search(template) and "tools" not in template else template
