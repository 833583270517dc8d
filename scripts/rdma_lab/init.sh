#!/bin/sh
# PID 1 of a guest. The kernel's command line names the guest's folder on the host (lab_home=..) and this file
# (lab_init=..); `settings` in that folder tells the rest. First stage: the host's root, read-only, gets an overlay in
# memory. Second stage, inside of it: devices, network, then jobs, one number a line on the control line.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

die() { echo "lab: $*" >/dev/console; halt_now; }
halt_now() {
  # neither sysvinit nor systemd is PID 1, so the system call itself (LINUX_REBOOT_CMD_POWER_OFF)
  /usr/bin/python3 -SEc 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'
  sleep 5
}

if [ "$1" != inside ]; then
  mount -t proc proc /proc || die "no /proc"
  for word in $(cat /proc/cmdline); do
    case $word in lab_home=*) home=${word#lab_home=} ;; lab_init=*) self=${word#lab_init=} ;; esac
  done
  mount -t tmpfs -o size=90% tmpfs /mnt && mkdir /mnt/upper /mnt/work /mnt/root || die "no tmpfs on /mnt"
  mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root || die "no overlay"
  exec chroot /mnt/root /bin/sh "$self" inside "$home"
fi

home=$2
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount -t devpts devpts /dev/pts
mkdir -p /lab /run/guest
# what a job prints is for the host to read while the job runs: no write stays in the guest's page cache
mount -t hostfs -o sync,"$home" none /run/guest || die "no hostfs for $home"
. /run/guest/settings
mount -t hostfs -o "$lab_shared" none /lab || die "no hostfs for $lab_shared"
printf '%s\n' "$lab_hosts" >>/etc/hosts
hostname "$lab_name" 2>/dev/null || echo "$lab_name" >/proc/sys/kernel/hostname
ulimit -l unlimited
ip link set lo up
echo 20000 >/proc/sys/net/core/netdev_max_backlog
rail=0
for address in $lab_addresses; do
  nic=lan$rail
  if [ "$lab_alone" = yes ]; then
    ip link add "$nic" mtu "$lab_mtu" type dummy
  else
    # the cable's own device closes its descriptor for good when it goes down: links go down on one above it
    ip link set "vec$rail" mtu "$lab_mtu" || die "no network device vec$rail"
    if ip link add "$nic" link "vec$rail" mtu "$lab_mtu" type macvlan mode passthru 2>/dev/null; then
      ip link set "vec$rail" up
    else
      echo "lab: this kernel has no macvlan: a link that goes down stays down" >/dev/console
      ip link set "vec$rail" name "$nic"
    fi
  fi
  ip link set "$nic" up || die "no network device $nic"
  ip addr add "$address" dev "$nic"
  rdma link add "rxe$rail" type rxe netdev "$nic" || die "no Soft-RoCE device on $nic"
  rail=$((rail + 1))
done

renice -n "$lab_nice" -p $$ >/dev/null
exec 3<>/dev/tty1 || die "no control line"
stty raw -echo <&3
echo ready >&3
while read -r number <&3; do
  [ "$number" = halt ] && break
  job=/run/guest/$number
  (
    exec 3<&-
    setsid /bin/bash "$job.sh" </dev/null >"$job.out" 2>"$job.err"
    echo $? >"$job.rc.new"
    mv "$job.rc.new" "$job.rc"
  ) &
done
# the host said so, or the host's side of the line is gone
halt_now
