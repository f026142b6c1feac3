# docker build -t train_moe .
# mkdir -p runs && docker run --rm -it --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD/runs:/train_moe/runs" train_moe
# runs/ stays, and --user makes its files yours: the image's own user has number 1000, and may not write into folders of others.
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04
# NCCL is newer than the image's, which is held. curl, pip and venv: for scripts/fineweb.sh and packages of Python.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-change-held-packages \
        git gcc libc6-dev make python3 zlib1g-dev libopenblas-dev libopenmpi-dev openmpi-bin libnccl2 libnccl-dev \
        curl ca-certificates python3-pip python3-venv && \
    rm -rf /var/lib/apt/lists/* && install -d -o ubuntu /train_moe && git config --system --add safe.directory /train_moe
# The user of Ubuntu's image, not root: mpirun needs no --allow-run-as-root.
USER ubuntu
COPY --chown=ubuntu . /train_moe
WORKDIR /train_moe
# Whoever --user names may build again, and write corpora.
RUN make -j"$(nproc)" cpu cuda ARCHS=all && chmod a+rwX . && chmod -R a+rwX build
