# Measure $1 launches of two kinds in turn; other work on the machine meets both alike.
export OMP_NUM_THREADS=1
for launch in $(seq "$1"); do
  meshwise measure gemm --nproc 1 --square 64,128,256,512 --mode warm --iterations 100 --runs gemm
  meshwise measure collectives all_reduce --nproc 2 --sizes 64K,1M --mode warm --as-measured \
    --iterations 100 --runs collectives
done
