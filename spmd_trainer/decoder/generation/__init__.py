"""Generation with a language model: sampling, stop strings and the loop, inside one compiled program.

| module | purpose |
|---|---|
| `settings` | `GenerationSettings`, the field `generation` of a model; read from generation_config.json |
| `decode` | continues the prompts of a batch |
| `loop` | the loop that generates one token per step |
| `sampling` | temperature, top-k, top-p; one PRNG key per row |
| `stop_strings` | the automaton that finds stop strings; cuts the text before them |
"""
