"""Print random uneven exchanges of embeddings for --tables: tables.py COUNT [RANKS, by default 4].

As ml_perf_model's generate_a2a_params.py draws them: batch 256 to 4096, dim 32 to 256, 1 to 20
tables a rank, at most 0.9 x 16 GiB of rows in all.
"""

import random
import sys

ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 4
draw = random.Random(0)
left = int(sys.argv[1])
while left:
    batch, dim = 2 ** draw.randint(8, 12), 2 ** draw.randint(5, 8)
    tables = [draw.randint(1, 20) for _ in range(ranks)]
    if batch * sum(tables) * dim * 4 < 0.9 * 16 * 2**30:
        print(f"{batch},{'-'.join(map(str, tables))},{dim}")
        left -= 1
