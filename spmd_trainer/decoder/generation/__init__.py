"""Generation with a language model: sampling, stop strings and the loop, inside one compiled program.

| module | purpose |
|---|---|
| `settings` | `GenerationSettings`, the field `generation` of a model; read from generation_config.json |
| `decode` | continues the batches of a decode program |
| `loop` | the loop over tokens |
| `sampling` | temperature, top-k, top-p; one key per row |
| `stop_strings` | the automaton that finds stop strings, and the cut of the text |
"""
