python3 -m pip install -q --no-deps --no-build-isolation -e . 2>&1 | tail -1
export PYTHONUNBUFFERED=1
for c in 776 11000 51864 50280; do for p in 0 1 2; do timeout 200 python3 -m bench.run --grid --case $c --dtypes bfloat16,float32,float16 --compile-only --part $p/3 > /tmp/c_$c$p.log 2>&1 & done; done
timeout 200 python3 -m pytest -q tests/test_kernels.py -k "second or two_tiles or float16_and_large or no_classes or out_of_range or another_thread" 2>&1 | grep "^E  \|^tests\|passed\|failed\|^FAILED" | cut -c1-300 | head -60
timeout 200 python3 -m pytest -q tests/test_deferred.py -k "one_graph or share or checkpointed" 2>&1 | grep "^E  \|^tests\|Error\|passed\|failed\|^FAILED" | cut -c1-400 | head -60
wait; date
for c in 776 11000 51864 50280; do timeout 280 python3 -m bench.run --grid --case $c --dtypes bfloat16,float32,float16 --providers eager,inductor,fx_fusion --out $OUT/grid_new.jsonl 2>&1 | tail -45; done
date
