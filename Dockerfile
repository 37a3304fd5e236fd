# trtopt with CUDA and TensorRT. Build: docker build -t trtopt .
# Run: docker run --rm --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/models" trtopt build model.onnx --int8 --calib calib.npz
# CI does not build this image, and it was never built: the base image has several gigabytes, and only a GPU makes use of it.
ARG TENSORRT_IMAGE=nvcr.io/nvidia/tensorrt:25.06-py3

FROM ${TENSORRT_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY trtopt trtopt
COPY recipes recipes
RUN python3 -m pip wheel --no-deps --wheel-dir /dist .

FROM ${TENSORRT_IMAGE}
COPY --from=wheel /dist /dist
# TensorRT and its Python module are those of the base image; calibration and verification run on the CPU.
# A Python of Ubuntu 24.04 takes nothing from pip without PIP_BREAK_SYSTEM_PACKAGES; an older pip does not know it.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir "$(ls /dist/*.whl)[cpu]" "cuda-python>=12.6.1,<13"
# Engines belong to whoever --user says, and the cache is anyone's; an image with a user could not write to /models.
ENV HOME=/tmp
WORKDIR /models
ENTRYPOINT ["trtopt"]
CMD ["--help"]
