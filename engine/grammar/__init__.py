"""Answers that follow a JSON schema, a regular expression, a list of choices or a grammar, by masks over the tokens.

* `constraint.Constraint` says what an answer must follow. It is a value: two equal ones share one compiled grammar.
* `parts` composes grammars of literal text, tokens and sub-schemas, for forced tool calls:

      from engine.grammar.constraint import Constraint
      from engine.grammar.parts import literal, schema, separated, sequence

      call = sequence(literal("<tool_call>\\n"), schema(arguments), literal("\\n</tool_call>"))
      constraint = Constraint.of_parts(separated(call, literal("\\n"), least=1), param="tool_choice")

* `asked` reads constraints from the fields of requests. `GenerationJob.constraint` (`engine/server/requests.py`) is
  what the answers of a request follow.
* `compiler.GrammarCompiler` compiles constraints in bounded time and memory, and keeps them; `allowed.AllowedTokens` is
  the state of one answer; `fills.MaskFills` computes masks while the device computes the step that needs them.

A constraint knows nothing of stop strings, prompts or KV blocks: an answer's masks depend on its own tokens alone.
"""
