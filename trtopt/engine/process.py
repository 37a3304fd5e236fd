"""How the process of a compiler starts."""

START = "import os, sys; os.environ.pop('NVIDIA_TF32_OVERRIDE', None); sys.path.append(sys.argv[1]); "
"""What it runs first; its first argument is the folder that holds trtopt.

``NVIDIA_TF32_OVERRIDE`` turns TF32 on or off in every build, behind the options' back: ``--tf32`` is the option, and
the key of the cache knows no other. ``CUDA_MODULE_LOADING`` and ``TRT_INTERNAL_OPTIONS`` left the engines of TensorRT
for RTX 1.7.1 as they were, to the byte.
"""
