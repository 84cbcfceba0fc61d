/* Hugging Face's GPT-2 weights. The contract is checkpoint.h's, which is the one to include. */
#ifndef MODEL_SAFETENSORS_H
#define MODEL_SAFETENSORS_H

#include "base/error.h"
#include "model/gpt2.h"

Status safetensors_read_config(const char *path, Gpt2Config *config);
Status safetensors_read_params(const char *path, const Gpt2Config *config, const ParamTable *table, float *params);

#endif
