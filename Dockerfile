# docker build -t train_moe .
# mkdir -p runs data/corpus && docker run --rm -it --gpus all --shm-size 1g --user "$(id -u):$(id -g)" \
#     -v "$PWD/runs:/train_moe/runs" -v "$PWD/data/corpus:/train_moe/data/corpus" train_moe
# runs/ and data/corpus/, where fineweb.sh downloads, stay. --user makes their files yours: the image's own user has number 1000,
# and may not write into folders of others.
FROM nvidia/cuda:13.0.0-devel-ubuntu24.04
# NCCL is newer than the image's, which is held. nvcc needs g++. curl, pip and venv: for scripts/fineweb.sh and packages of
# Python. jq: for the pages' commands on logs.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-change-held-packages \
        git gcc g++ libc6-dev make python3 zlib1g-dev libopenblas-dev libopenmpi-dev openmpi-bin libnccl2 libnccl-dev \
        curl ca-certificates jq python3-pip python3-venv && \
    rm -rf /var/lib/apt/lists/* && install -d -o ubuntu /train_moe && git config --system --add safe.directory /train_moe
# The user of Ubuntu's image, not root: mpirun needs no --allow-run-as-root.
USER ubuntu
COPY --chown=ubuntu . /train_moe
WORKDIR /train_moe
# Whoever --user names may build again, and write corpora.
RUN make -j"$(nproc)" cpu cuda ARCHS=all && mkdir -p data/corpus && chmod a+rwX . data/corpus && chmod -R a+rwX build
