#!/bin/sh
# Two hosts with two ranks each, as network namespaces of this machine with 1 Gbit/s between them (root, ip, tc):
#
#     examples/fewer_bytes/two_hosts.sh stage3 zeropp stage0 onebit [-- --steps 5 --width 1024]
#
# Each way of train.py is run in turn. RATE is the speed of the link, PYTHON the interpreter.
set -eu
ways=""
while [ $# -gt 0 ]; do
    if [ "$1" = -- ]; then shift; break; fi
    ways="$ways $1"; shift
done
here=$(dirname "$0") tag=fb$$ rate=${RATE:-1gbit} python=${PYTHON:-python3}
net=10.$((100 + $$ % 100)).$(($$ / 100 % 250))

clean() {
    for host in 1 2; do
        ip netns pids "$tag$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del "$tag$host" 2>/dev/null || true
    done
}
trap clean EXIT
trap 'exit 130' INT TERM

ip netns add "${tag}1"
ip netns add "${tag}2"
ip link add eth0 netns "${tag}1" type veth peer name eth0 netns "${tag}2"
for host in 1 2; do
    ip -n "$tag$host" addr add "$net.$host/24" dev eth0
    ip -n "$tag$host" link set eth0 up
    ip -n "$tag$host" link set lo up
    tc -n "$tag$host" qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 50ms
done

port=29500
for way in $ways; do
    port=$((port + 1)) jobs=""
    for rank in 0 1 2 3; do
        env RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 OMP_NUM_THREADS=1 \
            MASTER_ADDR="$net.1" MASTER_PORT=$port GLOO_SOCKET_IFNAME=eth0 DS_ACCELERATOR=cpu \
            nsenter --net="/run/netns/$tag$((rank / 2 + 1))" unshare --uts \
            sh -c "hostname $tag$((rank / 2 + 1)); exec \"\$@\"" sh \
            "$python" "$here/train.py" --way "$way" "$@" &
        jobs="$jobs $!"
    done
    for job in $jobs; do wait "$job"; done
done
