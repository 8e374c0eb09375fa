#!/bin/bash
# A real Slurm on this machine's loopback interface, without systemd; with ACCOUNTING=1 it has slurmdbd and MariaDB, too.
#   loopback.sh install            Debian's slurm-wlm and munge (slurmdbd, mariadb-server), where they are not there yet
#   loopback.sh up FOLDER [NODES]  munged, slurmctld and NODES (2) slurmd, each a node of 2 cores and 2 tasks' worth of memory
#   loopback.sh down FOLDER        stop them, by their process ids, and everything that they started
# Partitions: main (all nodes, jobs are requeued when preempted), high (all nodes, preempts main), first and last (one node each).
# The configuration is in /etc/slurm/slurm.conf while it is up, because jobs of Snakemake's plugin do not inherit SLURM_CONF.
set -euo pipefail

CONF=/etc/slurm/slurm.conf
MARK="# written by tests/slurm/loopback.sh"
PROGRAMS=(munged slurmctld slurmd sbatch srun squeue scontrol sinfo scancel)
PACKAGES=(slurm-wlm munge)
DATABASE_PORT=26820 ACCOUNTING_PORT=26819
if [ "${ACCOUNTING:-}" = 1 ]; then
    PROGRAMS+=(slurmdbd sacct sacctmgr mariadbd mariadb-install-db)
    PACKAGES+=(slurmdbd mariadb-server)
fi

refuse() {
    echo "error: loopback.sh: $1: $2" >&2
    exit 2
}

missing() {
    for program in "${PROGRAMS[@]}"; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

install() {
    [ -z "$(missing)" ] && return
    command -v apt-get >/dev/null || refuse "there is no apt-get here, and no $(missing | paste -sd' ')" "install Slurm and munge"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${PACKAGES[@]}"; } >&2 ||
        refuse "apt-get does not install ${PACKAGES[*]}" "see what it says above; it needs a package index"
    [ -z "$(missing)" ] || refuse "${PACKAGES[*]} lack $(missing | paste -sd' ')" "this script knows Debian 12's"
}

accounting() { # FOLDER
    if [ "${ACCOUNTING:-}" = 1 ]; then
        echo "AccountingStorageType=accounting_storage/slurmdbd"
        echo "AccountingStorageHost=127.0.0.1"
        echo "AccountingStoragePort=$ACCOUNTING_PORT"
        echo "AccountingStoragePass=$1/run/munge.sock" # slurmdbd's callers look for munge here
    else
        echo "AccountingStorageType=accounting_storage/none"
    fi
}

database() { # FOLDER: MariaDB on loopback, and slurmdbd, which keeps what jobs took in it
    local folder=$1 secret
    secret=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
    mkdir -p "$folder/database"
    mariadb-install-db --no-defaults --user=root --datadir="$folder/database" --skip-test-db \
        --auth-root-authentication-method=normal >"$folder/log/mariadb-install.log" 2>&1
    (umask 077 && cat >"$folder/etc/first.sql") <<C
CREATE DATABASE slurm;
CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '$secret';
GRANT ALL ON slurm.* TO slurm@'127.0.0.1';
C
    mariadbd --no-defaults --user=root --datadir="$folder/database" --socket="$folder/run/mariadb.sock" \
        --pid-file="$folder/run/mariadbd.pid" --bind-address=127.0.0.1 --port=$DATABASE_PORT --skip-name-resolve \
        --init-file="$folder/etc/first.sql" >"$folder/log/mariadbd.log" 2>&1 &
    (umask 077 && cat >/etc/slurm/slurmdbd.conf) <<C
$MARK
AuthType=auth/munge
AuthInfo=socket=$folder/run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$ACCOUNTING_PORT
SlurmUser=root
PidFile=$folder/run/slurmdbd.pid
LogFile=$folder/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$DATABASE_PORT
StorageUser=slurm
StoragePass=$secret
StorageLoc=slurm
CommunicationParameters=NoInAddrAny
C
    answers() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
    within_30_s answers $DATABASE_PORT || { down "$folder" && refuse "MariaDB does not answer within 30 s" "see $folder/log/mariadbd.log"; }
    slurmdbd
    within_30_s answers $ACCOUNTING_PORT || { down "$folder" && refuse "slurmdbd does not answer within 30 s" "see $folder/log/slurmdbd.log"; }
    sacctmgr --immediate add cluster loopback >"$folder/log/sacctmgr.log" ||
        { down "$folder" && refuse "slurmdbd takes no cluster" "see $folder/log/slurmdbd.log"; }
}

within_30_s() { # COMMAND...: wait until it succeeds
    for _ in $(seq 300); do
        if "$@"; then return; fi
        sleep 0.1
    done
    return 1
}

configuration() { # FOLDER NODES
    local host
    host=$(hostname -s)
    cat <<C
$MARK
ClusterName=loopback
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$1/run/munge.sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool/%n
SlurmctldPidFile=$1/run/slurmctld.pid
SlurmdPidFile=$1/run/slurmd-%n.pid
SlurmctldLogFile=$1/log/slurmctld.log
SlurmdLogFile=$1/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
$(accounting "$1")
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
MinJobAge=3600
KillWait=10
SlurmdTimeout=60
InactiveLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
C
    for node in $(seq "$2"); do
        echo "NodeName=n$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((27000 + node)) CPUs=2 RealMemory=16000 State=UNKNOWN"
    done
    cat <<C
PartitionName=main Nodes=n[1-$2] Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-$2] MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=first Nodes=n1 MaxTime=60 State=UP PriorityTier=1
PartitionName=last Nodes=n$2 MaxTime=60 State=UP PriorityTier=1
C
}

up() { # FOLDER NODES
    local folder=$1 nodes=${2:-2} earlier
    install
    if [ -e $CONF ]; then
        grep -qxF "$MARK" $CONF || refuse "$CONF is of another Slurm" "run this where no Slurm is configured"
        earlier=$(sed -n 's/^StateSaveLocation=\(.*\)\/state$/\1/p' $CONF)
        [ -z "$(living "$earlier")" ] || refuse "a Slurm of this script is up" "loopback.sh down $earlier"
        echo "a Slurm of this script in $earlier ended without being taken down; its configuration is removed" >&2
        down "$earlier"
    fi
    mkdir -p "$folder"/{run,log,state,munge,etc} /etc/slurm
    for node in $(seq "$nodes"); do mkdir -p "$folder/spool/n$node"; done
    chmod 755 "$folder" "$folder/run"
    chmod 711 "$folder/munge"
    configuration "$folder" "$nodes" >$CONF
    # Slurm 22.05 wants to be told of a hierarchy of cgroups that nothing here uses.
    printf '%s\nCgroupPlugin=cgroup/v1\nCgroupAutomount=no\nCgroupMountpoint=%s\n' "$MARK" "$folder/cgroup" >/etc/slurm/cgroup.conf
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/munge.key")
    munged --force --key-file="$folder/munge/munge.key" --socket="$folder/run/munge.sock" \
        --pid-file="$folder/run/munged.pid" --log-file="$folder/log/munged.log" --seed-file="$folder/munge/munge.seed"
    if [ "${ACCOUNTING:-}" = 1 ]; then database "$folder"; fi
    slurmctld
    for node in $(seq "$nodes"); do slurmd -N "n$node"; done
    for _ in $(seq 300); do
        if [ "$(timeout 10 sinfo -h -t idle -N -p main 2>/dev/null | wc -l)" = "$nodes" ]; then
            echo "Slurm is up: $nodes nodes, in $folder" >&2
            return
        fi
        sleep 0.1
    done
    tail -n 5 "$folder"/log/*.log >&2
    down "$folder"
    refuse "its nodes do not come up within 30 s" "the ends of its logs stand above"
}

living() { # FOLDER: the ids of the daemons of this folder that still run; an id may have gone to another program since
    local file pid
    for file in "$1"/run/slurmd-*.pid "$1"/run/{slurmctld,slurmdbd,mariadbd,munged}.pid; do
        [ -e "$file" ] || continue
        pid=$(cat "$file")
        case "$(cat "/proc/$pid/comm" 2>/dev/null)" in slurmd | slurmctld | slurmdbd | mariadbd | munged) echo "$pid" ;; esac
    done
}

ended() { # PID: wait until it is gone
    for _ in $(seq 100); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    kill -KILL "$1"
}

down() { # FOLDER
    local folder=$1 pid file
    if [ -n "$(living "$folder")" ]; then
        timeout 20 scancel --signal=KILL --full --state=RUNNING --user=root || true
        timeout 20 scancel --user=root || true
        for _ in $(seq 100); do
            [ -z "$(timeout 10 squeue -h -t RUNNING,COMPLETING 2>/dev/null)" ] && break
            sleep 0.1
        done
    fi
    for pid in $(living "$folder"); do
        if kill -TERM "$pid" 2>/dev/null; then ended "$pid"; fi
    done
    rm -f "$folder"/run/*.pid
    for file in $CONF /etc/slurm/cgroup.conf /etc/slurm/slurmdbd.conf; do
        if [ -e "$file" ] && grep -qxF "$MARK" "$file"; then rm -f "$file"; fi
    done
}

[ "$(id -u)" = 0 ] || refuse "a Slurm that starts jobs needs root" "run as root, in a container or a virtual machine"
case "${1:-}" in
install) install ;;
up) up "$(realpath -m "${2:?a folder}")" "${3:-2}" ;;
down) down "$(realpath -m "${2:?a folder}")" ;;
*) refuse "'${1:-}' is no command" "install, up FOLDER [NODES] or down FOLDER" ;;
esac
