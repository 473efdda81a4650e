"""The search as it went, in one HTML page that needs nothing else: pick a run, play, drag.

Above, the best step over evaluations up to the moment shown; below, for runs that kept an archive,
the archive's cells and the best placement then; for the others the placement at the end. The data
stands in the page as JSON; names are shown as text, never as markup.
"""

from html import escape
from typing import Any

from partita.jobs.experiment import ExperimentOutcome, RunRecord
from partita.report.html_parts import document, embedded

MOST_POINTS = 400


def animation_page(outcome: ExperimentOutcome) -> str:
    """The page for all runs of an experiment."""
    runs = [_as_data(run) for run in outcome.runs if run.history]
    runs.sort(key=lambda run: not run["frames"])  # those that move most come first
    data = embedded(runs)
    title = f"{outcome.experiment.name}: the search"
    return document(
        title,
        _STYLE,
        f'<h1>{escape(title)}</h1><p><a href="index.html">Back to the tables and charts</a></p>'
        f"{_BODY}<script>const RUNS={data};\n{_SCRIPT}</script>",
    )


def _as_data(run: RunRecord) -> dict[str, Any]:
    step = max(1, len(run.history) // MOST_POINTS)
    points = [[max(1, e), s * 1e3] for _, e, s in run.history[::step]]
    last = run.history[-1]
    points.append([max(run.evaluations, last[1], 1), last[2] * 1e3])
    return {
        "name": f"{run.case} · {run.optimiser} · seed {run.seed}",
        "points": points,
        "bound": None if run.lower_bound_s is None else run.lower_bound_s * 1e3,
        "devices": list(run.devices),
        "layers": list(run.layers),
        "placement": list(run.placement),
        "classes": list(run.class_bytes),
        "frames": [
            {
                "e": frame.evaluations,
                "s": frame.best_s * 1e3,
                "p": list(frame.placement),
                "c": [[used, kind, s * 1e3, fits] for used, kind, s, fits in frame.cells],
            }
            for frame in run.frames
        ],
    }


_STYLE = """
body{max-width:980px}select,button{font:inherit;padding:.2rem .5rem}select{max-width:100%}
#time{width:60%}svg{display:block;width:100%;height:auto;margin:.6rem 0}
text{font:12px ui-sans-serif,system-ui,Helvetica,Arial,sans-serif;fill:var(--ink)}
text.c{fill:#1f2328}.n{fill:var(--card)}
.row{display:flex;gap:.6rem;align-items:center;margin:.5rem 0;flex-wrap:wrap}
""".strip()

_BODY = """
<div class="row"><select id="run" aria-label="run"></select></div>
<div class="row"><button id="play">Play</button>
<input id="time" type="range" min="0" max="100" value="100" aria-label="moment">
<span id="now"></span></div>
<svg id="curve" viewBox="0 0 940 260" role="img" aria-label="best step so far"></svg>
<svg id="cells" viewBox="0 0 940 10" role="img" aria-label="archive"></svg>
<svg id="strip" viewBox="0 0 940 10" role="img" aria-label="placement"></svg>
""".strip()

# Plain functions over the DOM; every text goes through textContent.
_SCRIPT = """
const $=id=>document.getElementById(id), NS="http://www.w3.org/2000/svg";
function add(parent,tag,attrs,text){const e=document.createElementNS(NS,tag);
 for(const k in attrs)e.setAttribute(k,attrs[k]);
 if(text!==undefined)e.textContent=text;parent.appendChild(e);return e}
function clear(e){while(e.firstChild)e.removeChild(e.firstChild)}
function shade(v,lo,hi){const p=hi>lo?Math.pow((v-lo)/(hi-lo),.6):0;
 return `hsl(${Math.round(140*(1-p))},62%,74%)`}
const HUES=[212,28,172,340,250,64,200,6,210,140,285,50];
const bytes=b=>{if(!b)return"none";const u=["B","KiB","MiB","GiB","TiB"];let i=0;
 while(b>=1024&&i<4){b/=1024;i++}return`${b.toPrecision(3)} ${u[i]}`};
const num=v=>v>=1e4?`${+(v/1e3).toPrecision(3)}k`:String(+v.toPrecision(4));
let run=RUNS[0],timer=null;
function steps(){return run.frames.length?run.frames.length:run.points.length}
function moment(){const i=Math.min(steps()-1,+$("time").value);
 if(run.frames.length){const f=run.frames[i];
  return{e:f.e,s:f.s,p:f.p,c:f.c,last:i===run.frames.length-1}}
 const[e,s]=run.points[i],last=i===run.points.length-1;
 return{e,s,p:last?run.placement:null,c:null,last}}
function curve(at){const g=$("curve");clear(g);
 const pts=run.points.filter(p=>p[0]<=at.e),all=run.points;
 const lx=v=>Math.log10(Math.max(1,v)),x0=lx(all[0][0]);
 const x1=Math.max(lx(all[all.length-1][0]),x0+.01);
 const ys=all.map(p=>p[1]).concat(run.bound?[run.bound]:[]);
 const ly=Math.log10,y0=ly(Math.min(...ys))-.02,y1=ly(Math.max(...ys))+.02;
 const X=v=>70+(lx(v)-x0)/(x1-x0)*830,Y=v=>220-(ly(v)-y0)/(y1-y0)*190;
 add(g,"path",{d:"M70 30V220H900",fill:"none",stroke:"#9aa3ad"});
 add(g,"text",{x:480,y:252,"text-anchor":"middle"},"evaluations (logarithmic)");
 for(const v of[Math.min(...ys),Math.max(...ys)])
  add(g,"text",{x:64,y:Y(v)+4,"text-anchor":"end"},num(v));
 for(let k=Math.ceil(x0);k<=x1;k++)
  add(g,"text",{x:X(10**k),y:236,"text-anchor":"middle"},num(10**k));
 if(run.bound){add(g,"path",{d:`M70 ${Y(run.bound)}H900`,stroke:"#999","stroke-dasharray":"5 4"});
  add(g,"text",{x:900,y:Y(run.bound)-5,"text-anchor":"end"},"lower bound")}
 const line=p=>p.map((q,i)=>i?`H${X(q[0])}V${Y(q[1])}`:`M${X(q[0])} ${Y(q[1])}`).join("");
 add(g,"path",{d:line(all),fill:"none",stroke:"var(--line)","stroke-width":2});
 if(pts.length){const d=line(pts)+`H${X(at.e)}`;
  add(g,"path",{d,fill:"none",stroke:"#2f74d0","stroke-width":2.5});
  add(g,"circle",{cx:X(at.e),cy:Y(pts[pts.length-1][1]),r:5,fill:"#2f74d0"})}
 add(g,"text",{x:70,y:18},"best step so far, ms (logarithmic)")}
function cells(at){const g=$("cells");clear(g);
 if(!at.c){g.setAttribute("viewBox","0 0 940 1");return}
 const n=run.devices.length,m=run.classes.length,w=Math.min(76,820/m),h=34;
 g.setAttribute("viewBox",`0 0 940 ${n*h+70}`);
 add(g,"text",{x:0,y:14},"archive: best step (ms) by devices used and bytes sent; (over memory)");
 const fit=run.frames[run.frames.length-1].c.filter(c=>c[3]),end=fit.map(c=>c[2]);
 const lo=Math.min(...end);
 const hi=Math.max(...end);
 for(let r=0;r<n;r++){const y=24+(n-1-r)*h;
  add(g,"text",{x:80,y:y+22,"text-anchor":"end"},`${r+1} used`);
  for(let k=0;k<m;k++)add(g,"rect",{x:90+k*w,y,width:w-2,height:h-2,rx:4,class:"n"})}
 for(const[u,k,v,ok]of at.c){const y=24+(n-u)*h;
  add(g,"rect",{x:90+k*w,y,width:w-2,height:h-2,rx:4,
   fill:ok?shade(Math.min(v,hi),lo,hi):"#d5d9de"});
  add(g,"text",{x:90+k*w+w/2-1,y:y+21,"text-anchor":"middle",class:"c"},
   ok?num(v):`(${num(v)})`)}
 run.classes.forEach((b,k)=>
  add(g,"text",{x:90+k*w+w/2-1,y:24+n*h+16,"text-anchor":"middle"},bytes(b)))}
function strip(at){const g=$("strip");clear(g);
 if(!at.p||!at.p.length){g.setAttribute("viewBox","0 0 940 1");return}
 const n=run.devices.length,h=22,w=790/at.p.length;
 g.setAttribute("viewBox",`0 0 940 ${n*h+50}`);
 add(g,"text",{x:0,y:14},at.last?"placement: layers from left to right":"best placement so far");
 run.devices.forEach((d,r)=>{
  add(g,"text",{x:140,y:24+r*h+15,"text-anchor":"end"},d.length>20?d.slice(0,19)+"…":d);
  add(g,"rect",{x:148,y:24+r*h,width:790,height:h-2,class:"n"})});
 at.p.forEach((d,i)=>{const e=add(g,"rect",{x:148+i*w,y:24+d*h,width:Math.max(w-.3,.5),
  height:h-2,fill:`hsl(${HUES[d%12]},58%,58%)`});
  add(e,"title",{},`${run.layers[i]}: ${run.devices[d]}`)})}
function draw(){if(!run)return;const at=moment();curve(at);cells(at);strip(at);
 $("now").textContent=`${num(at.e)} evaluations, ${num(at.s)} ms`}
function choose(){run=RUNS[+$("run").value];const t=$("time");t.max=steps()-1;t.value=t.max;draw()}
function stop(){clearInterval(timer);timer=null;$("play").textContent="Play"}
function play(){if(timer){stop();return}const t=$("time");if(+t.value>=+t.max)t.value=0;
 $("play").textContent="Pause";const wait=Math.max(40,Math.min(200,6000/steps()));
 timer=setInterval(()=>{t.value=+t.value+1;draw();if(+t.value>=+t.max)stop()},wait)}
RUNS.forEach((r,i)=>{const o=document.createElement("option");o.value=i;o.textContent=r.name;
 $("run").appendChild(o)});
$("run").onchange=()=>{stop();choose()};$("time").oninput=()=>{stop();draw()};$("play").onclick=play;
if(RUNS.length){choose()}else{$("now").textContent="no run has ended yet"}
""".strip()
