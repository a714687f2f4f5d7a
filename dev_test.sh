set -x
python3 -m pip install -q --no-deps --no-build-isolation -e . 2>&1 | tail -1
export PYTHONUNBUFFERED=1
(python3 dev_run.py $OUT/divisibility.json 2>&1 | tail -40) 
date
timeout 420 python3 -m pytest -q -x --maxfail=30 tests/test_layouts.py tests/test_kernels.py tests/test_deferred.py tests/test_speculate.py tests/test_net.py tests/test_report.py tests/test_masks.py 2>&1 | tail -60
date
