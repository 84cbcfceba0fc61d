/* Models in files: llm.c's format (read f32 v3 and bf16 v5, written as v3) and Hugging Face's safetensors (read).
 * Byte layouts: docs/formats.md. Every fault of a file is BAD_INPUT: the file, what was expected, what was found. */
#ifndef MODEL_CHECKPOINT_H
#define MODEL_CHECKPOINT_H

#include "base/error.h"
#include "model/gpt2.h"

/* Reads the sizes only, and checks that the file's size fits them. For safetensors (a name ending in ".safetensors")
 * heads come from the "config.json" beside it when there is one, else channels/64. */
Status checkpoint_read_config(const char *path, Gpt2Config *config);

/* Fills params f32[table->elems], laid out by gpt2_param_table for the config that checkpoint_read_config gave. */
Status checkpoint_read_params(const char *path, const Gpt2Config *config, const ParamTable *table, float *params);

/* Writes llm.c's version 3, complete or not at all. */
Status checkpoint_write(const char *path, const Gpt2Config *config, const ParamTable *table, const float *params);

#endif
