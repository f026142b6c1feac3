# docker build -t train_moe .
# mkdir -p runs && docker run --rm -it --gpus all --shm-size 1g -v "$PWD/runs:/train_moe/runs" train_moe   # runs/ stays
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04
# NCCL is newer than the image's, which is held.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-change-held-packages \
        git gcc libc6-dev make python3 zlib1g-dev libopenblas-dev libonig-dev libopenmpi-dev openmpi-bin libnccl2 libnccl-dev && \
    rm -rf /var/lib/apt/lists/* && install -d -o ubuntu /train_moe
# The user of Ubuntu's image, not root: mpirun needs no --allow-run-as-root.
USER ubuntu
COPY --chown=ubuntu . /train_moe
WORKDIR /train_moe
RUN make -j"$(nproc)" cpu cuda ARCHS=all
