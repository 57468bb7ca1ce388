"""python -m w4q MODULE ARGUMENTS: runs another Python program, in which transformers loads w4q's folders:
python -m w4q lm_eval --model hf --model_args pretrained=OUT --tasks wikitext"""

import runpy
import sys

if len(sys.argv) < 2:
    sys.exit(__doc__)
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
