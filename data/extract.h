/* Readers of two packings in which Debian carries books: R's lazy-load databases and SWORD's compressed modules.
 * Anything damaged or unexpected is BAD_INPUT with the file's name; what was appended before stays. */
#ifndef DATA_EXTRACT_H
#define DATA_EXTRACT_H

#include "base/error.h"
#include "data/prose.h"

/* Appends every vector of strings in an R database (PACKAGE/data/Rdata.rdb), a string being a line; between vectors a
 * paragraph ends. */
Status extract_rdb(Prose *prose, const char *path);

/* Appends all blocks of one testament of a SWORD module, given its index (MODULE/ot.bzs; the data is ot.bzz). An empty
 * index appends nothing. */
Status extract_sword(Prose *prose, const char *index_path);

#endif
